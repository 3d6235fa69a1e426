KEEP = frozenset("xn1 p ctx mid xn2 gate up hq hk hv ho hg hu hd".split())
