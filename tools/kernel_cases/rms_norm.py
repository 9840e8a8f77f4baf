"""Cases of rms_norm.cu."""

from cupaged.kernels.launch import Array, Device
from cupaged.kernels.rms_norm import add_rms_norm_cuda, rms_norm_cuda
from tools.kernel_cases.case import DTYPES, ROUNDED, Arrays, Case, Maker


def rms_norm(element: str, num_rows: int, hidden_size: int, *, weight_offset: float = 0.0) -> Case:
    """Return the norm of some rows."""

    def make(maker: Maker) -> dict[str, Array]:
        return {
            "x": maker.normal((num_rows, hidden_size), DTYPES[element]),
            "weight": maker.normal((hidden_size,), DTYPES[element]),
            "out": maker.unwritten((num_rows, hidden_size), DTYPES[element]),
        }

    def launch(device: Device, arrays: Arrays) -> None:
        x, weight, out = (arrays[name] for name in ("x", "weight", "out"))
        rms_norm_cuda(device, x, weight, 1e-5, out, weight_offset=weight_offset)

    return Case(
        name=f"rms_norm-{element}-{num_rows}x{hidden_size}" + ("-offset" if weight_offset else ""),
        make=make,
        launch=launch,
        outputs=("out",),
        variables={"num_rows": num_rows, "hidden_size": hidden_size},
        tolerance=ROUNDED[element],
    )


def add_rms_norm(element: str, num_rows: int, hidden_size: int) -> Case:
    """Return the norm behind the addition to the residual stream."""

    def make(maker: Maker) -> dict[str, Array]:
        return {
            "x": maker.normal((num_rows, hidden_size), DTYPES[element]),
            "weight": maker.normal((hidden_size,), DTYPES[element]),
            "residual": maker.normal((num_rows, hidden_size), DTYPES[element]),
            "out": maker.unwritten((num_rows, hidden_size), DTYPES[element]),
        }

    def launch(device: Device, arrays: Arrays) -> None:
        x, weight, residual, out = (arrays[name] for name in ("x", "weight", "residual", "out"))
        add_rms_norm_cuda(device, x, weight, 1e-5, residual, out)

    return Case(
        name=f"add_rms_norm-{element}-{num_rows}x{hidden_size}",
        make=make,
        launch=launch,
        outputs=("residual", "out"),
        variables={"num_rows": num_rows, "hidden_size": hidden_size},
        tolerance=ROUNDED[element],
    )


GOLDENS = [
    rms_norm("bf16", 3, 576),
    rms_norm("f16", 2, 1096, weight_offset=1.0),
    rms_norm("float", 2, 20),
    add_rms_norm("bf16", 3, 576),
]
TRAFFIC = [rms_norm("bf16", 8, 4096), add_rms_norm("bf16", 8, 4096), add_rms_norm("float", 3, 1096)]
TIMED = [rms_norm("bf16", 256, 4096), add_rms_norm("bf16", 256, 4096), add_rms_norm("bf16", 8192, 4096)]
INSTANCES = [
    *(add_rms_norm("bf16", 1, hidden_size) for hidden_size in (576, 2048, 8192)),
    *(add_rms_norm(element, 1, 4096) for element in ("f16", "float")),
]
