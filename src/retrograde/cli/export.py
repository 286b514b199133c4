"""`retrograde export CKPT OUT` writes a checkpoint's weights as safetensors files, in one process, without a model."""

import argparse
from pathlib import Path

import torch

from retrograde.cli.commands import Commands

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_to(commands: Commands) -> None:
    parser = commands.add_parser("export", help="write the weights of a checkpoint as safetensors files")
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint, or a folder of several: the last")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    parser.add_argument("--file-size", default="5GB", help="what a file has at most (default 5GB)")
    parser.add_argument("--dtype", choices=DTYPES, help="of floating point numbers (default: as they were saved)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from retrograde.checkpoint.exporting import export_checkpoint  # takes long to import

    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    for file in export_checkpoint(arguments.checkpoint, arguments.out, arguments.file_size, dtype):
        print(file)
    return 0
