"""Cases of rms_norm.cu."""

from cupaged.kernels.launch import Array, Device
from cupaged.kernels.rms_norm import add_rms_norm_cuda, rms_norm_cuda
from tools.kernel_cases.case import DTYPES, Arrays, Case, Maker


def rms_norm(element: str, num_rows: int, hidden_size: int) -> Case:
    """Return the norm of num_rows rows alone."""

    def make(maker: Maker) -> dict[str, Array]:
        return {
            "x": maker.normal((num_rows, hidden_size), DTYPES[element]),
            "weight": maker.normal((hidden_size,), DTYPES[element]),
            "out": maker.unwritten((num_rows, hidden_size), DTYPES[element]),
        }

    def launch(device: Device, arrays: Arrays) -> None:
        rms_norm_cuda(device, arrays["x"], arrays["weight"], 1e-5, arrays["out"])

    return Case(
        name=f"rms_norm-{element}-{num_rows}x{hidden_size}",
        make=make,
        launch=launch,
        outputs=("out",),
        variables={"num_rows": num_rows, "hidden_size": hidden_size},
        tolerance=2**-8,
    )


def add_rms_norm(element: str, num_rows: int, hidden_size: int) -> Case:
    """Return the norm with the residual add in front of it."""

    def make(maker: Maker) -> dict[str, Array]:
        return {
            "x": maker.normal((num_rows, hidden_size), DTYPES[element]),
            "weight": maker.normal((hidden_size,), DTYPES[element]),
            "residual": maker.normal((num_rows, hidden_size), DTYPES[element]),
            "out": maker.unwritten((num_rows, hidden_size), DTYPES[element]),
        }

    def launch(device: Device, arrays: Arrays) -> None:
        add_rms_norm_cuda(device, arrays["x"], arrays["weight"], 1e-5, arrays["residual"], out=arrays["out"])

    return Case(
        name=f"add_rms_norm-{element}-{num_rows}x{hidden_size}",
        make=make,
        launch=launch,
        outputs=("residual", "out"),
        variables={"num_rows": num_rows, "hidden_size": hidden_size},
        tolerance=2**-8,
    )


GOLDENS = [
    rms_norm("bf16", 5, 96),
    rms_norm("float", 3, 1000),
    add_rms_norm("f16", 3, 576),
]
TIMED = [rms_norm("bf16", 256, 4096), add_rms_norm("bf16", 8192, 4096)]
INSTANCES = [add_rms_norm(element, 1, 4096) for element in DTYPES]
