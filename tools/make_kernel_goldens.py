"""Write tests/kernels/goldens/*.npz: what the emulator computes for the kernels' small cases.

    python -m tools.make_kernel_goldens [CASE ...]

Without a case all are made, and files of cases that are no more are removed. Make them again only when a
kernel is meant to compute something else, or a case was changed.
"""

import argparse

from tests.cuda_on_cpu.device import EmulatedDevice
from tools.kernel_cases import GOLDENS, PROBES
from tools.kernel_cases.goldens import GOLDENS_DIR, run, save


def main() -> None:
    """Make the goldens that the command line names, or all."""
    cases = {case.name: case for case in (*PROBES, *GOLDENS)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *cases], metavar="CASE")
    chosen = parser.parse_args().cases
    GOLDENS_DIR.mkdir(parents=True, exist_ok=True)
    for path in [] if chosen else GOLDENS_DIR.glob("*.npz"):
        if path.stem not in cases:
            path.unlink()
    total = 0
    for name in chosen or cases:
        num_bytes = save(cases[name], run(cases[name], EmulatedDevice(sources=cases[name].sources)))
        total += num_bytes
        print(f"{name:40} {num_bytes:7} bytes")
    print(f"{'':40} {total:7} bytes together")


if __name__ == "__main__":
    main()
