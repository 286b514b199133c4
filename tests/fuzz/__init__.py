"""Random models and random programs, compared with plain torch.

recipes.py   what a case consists of: plain data, whose repr is a program
models.py    models from it
generate.py  cases from seeds
play.py      one rank's part of a case, on a sharded model or on plain torch
touches.py   what all ranks do with parameters and gradients
oracle.py    all ranks' parts on plain torch, put together as the engine should
check.py     run a case on ranks and compare
shrink.py    the smallest case that still fails
__main__.py  `make fuzz`
"""
