KEEP = frozenset("rstd1 xn1 hq hk hv q k v p ctx ho mid rstd2 xn2 hg hu gate up silu act hd".split())
