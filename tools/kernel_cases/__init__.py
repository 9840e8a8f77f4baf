"""All named cases of the kernels, for goldens, times, the compile gate, traffic tests and kernel_report.

PROBES    each PTX function of gpu.cuh alone
GOLDENS   small; tests/kernels/goldens keep what these and the probes give, and a GPU must give the same
TRAFFIC   large enough to be like those in use, small enough for the emulator to count every access
TIMED     as large as in use; what tools/gpu_check times beside kernel_report's prediction
INSTANCES never run; with the others they name each set of constants that the compile gate compiles
"""

from tools.kernel_cases import (
    gated_mul,
    paged_decode,
    paged_prefill,
    rms_norm,
    rope_kv_write,
    rows,
    sampling,
)
from tools.kernel_cases.case import Case
from tools.kernel_cases.probe import PROBES

FAMILIES = (rms_norm, gated_mul, rope_kv_write, rows, paged_decode, paged_prefill, sampling)

GOLDENS: list[Case] = [case for family in FAMILIES for case in family.GOLDENS]
TRAFFIC: list[Case] = [case for family in FAMILIES for case in family.TRAFFIC]
TIMED: list[Case] = [case for family in FAMILIES for case in family.TIMED]
INSTANCES: list[Case] = [case for family in FAMILIES for case in family.INSTANCES]

__all__ = ["GOLDENS", "INSTANCES", "PROBES", "TIMED", "TRAFFIC"]
