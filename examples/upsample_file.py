# SPDX-License-Identifier: Apache-2.0
"""Make one cloud denser: python examples/upsample_file.py bunny.xyz dense.ply --ratio 4.93

The same as `apusmog upsample`, as three lines of Python.
"""

import argparse

from apusmog_core import Upsampler
from apusmog_core.data import read_points, write_points


def main() -> None:
    parser = argparse.ArgumentParser(description="Make one cloud denser.")
    parser.add_argument("input", help="a cloud: .xyz .ply .pcd .bin .npy")
    parser.add_argument("output", help="where to write the dense cloud")
    parser.add_argument("--ratio", type=float, default=4.0, help="output points per input point")
    parser.add_argument("--weights", default="shape", help="a shipped name or a file")
    args = parser.parse_args()

    sparse = read_points(args.input).points  # (n, 3)
    dense = Upsampler.load(args.weights).upsample(sparse, args.ratio)  # (round(ratio * n), 3)
    write_points(args.output, dense)
    print(f"{len(sparse)} -> {len(dense)} points")


if __name__ == "__main__":
    main()
