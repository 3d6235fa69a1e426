KEEP = frozenset("rstd1 ctx mid rstd2".split())
