KEEP = frozenset("xn1 p ctx mid xn2 gate up".split())
