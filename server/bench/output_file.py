"""Where `--output` writes: looked at before anything is measured."""

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """For argparse. Raises ArgumentTypeError for a path that cannot become a file."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written there")
    return path
