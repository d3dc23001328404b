# SPDX-License-Identifier: Apache-2.0
"""Every scan of a KITTI drive, a bag or a folder, dense, without ROS:

apusmog simulate street --frames 5        # or a KITTI raw drive of your own
python examples/pipeline_on_kitti.py street --ratio 4 --out dense
"""

import argparse
from pathlib import Path

from apusmog_core.config import PipelineConfig
from apusmog_core.data import open_scans, write_points
from apusmog_core.pipeline import ScanPipeline


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the objects of every scan dense.")
    parser.add_argument("scans", help="a KITTI drive or sequence, a bag, a folder, a file")
    parser.add_argument("--ratio", type=float, default=4.0, help="output points per input point")
    parser.add_argument("--weights", default="lidar", help="a shipped name or a file")
    parser.add_argument("--out", type=Path, help="folder for the dense clouds, as .ply")
    args = parser.parse_args()

    pipeline = ScanPipeline(PipelineConfig(ratio=args.ratio, weights=args.weights))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    for scan in open_scans(args.scans):
        dense = pipeline.process(scan.points, scan.intensity, ring=scan.ring)
        measured = len(dense.points) - dense.generated.sum()
        stages = "  ".join(f"{name} {ms:.0f} ms" for name, ms in dense.timings.items())
        print(f"{scan.name}: {measured} -> {len(dense.points)} object points  {stages}")
        if args.out:
            write_points(args.out / f"{scan.name}.ply", dense.points, dense.intensity)


if __name__ == "__main__":
    main()
