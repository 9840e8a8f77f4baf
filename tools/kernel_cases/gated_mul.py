"""Cases of gated_mul.cu."""

from cupaged.kernels.gated_mul import gelu_tanh_mul_cuda, silu_mul_cuda
from cupaged.kernels.launch import Array, Device
from tools.kernel_cases.case import DTYPES, ROUNDED, Arrays, Case, Maker

FUNCTIONS = {"silu_mul": silu_mul_cuda, "gelu_tanh_mul": gelu_tanh_mul_cuda}


def gated_mul(kernel: str, element: str, num_rows: int, size: int) -> Case:
    """Return the gate of some rows; spread over where its activation bends."""

    def make(maker: Maker) -> dict[str, Array]:
        return {
            "gate_up": maker.normal((num_rows, 2 * size), DTYPES[element], spread=3.0),
            "out": maker.unwritten((num_rows, size), DTYPES[element]),
        }

    def launch(device: Device, arrays: Arrays) -> None:
        FUNCTIONS[kernel](device, arrays["gate_up"], arrays["out"])

    return Case(
        name=f"{kernel}-{element}-{num_rows}x{size}",
        make=make,
        launch=launch,
        outputs=("out",),
        variables={"num_rows": num_rows, "size": size},
        tolerance=ROUNDED[element],
    )


GOLDENS = [
    gated_mul("silu_mul", "bf16", 3, 88),
    gated_mul("silu_mul", "float", 1, 20),
    gated_mul("gelu_tanh_mul", "f16", 3, 88),
]
TRAFFIC = [gated_mul("silu_mul", "bf16", 8, 2048), gated_mul("gelu_tanh_mul", "bf16", 3, 1400)]
TIMED = [gated_mul("silu_mul", "bf16", 256, 14336)]
INSTANCES: list[Case] = []
