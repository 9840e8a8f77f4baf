"""The machine of the paper's experiments, OPT-13B on an A100 of 40 GB, and a linear model of its time.

Every number is the paper's (section 3 and Table 1), a data sheet's, or stated here with its reason; none is
fitted to the paper's results.

    step  = weights / bandwidth + tokens * FLOP / rate + context * bytes of KV / bandwidth
    swap  = copies * COPY_SECONDS + bytes / link
"""

NUM_LAYERS, HIDDEN_SIZE = 40, 5120
NUM_PARAMETERS = 13e9
KV_BYTES = 2 * NUM_LAYERS * HIDDEN_SIZE * 2  # of a token: key and value, float16; the paper's 800 KB
NUM_SLOTS = 12 * 2**30 // KV_BYTES  # 12 GB of 40 are left for KV: the paper's 15.7 K tokens
# On a card of 80 GB as much is kept for weights and activations: 28 GB.
NUM_SLOTS_80GB = (80 - 28) * 2**30 // KV_BYTES

# Data sheet of the A100: 1,555 GB/s and 312 TFLOP/s. A copy reaches 0.9 of an H200's, a matrix product 0.8.
BANDWIDTH = 0.9 * 1555e9  # bytes per second
FLOP_RATE = 0.8 * 312e12  # per second
# PCIe 4.0, 16 lanes: 31.5 GB/s, of which large copies reach about 0.8; to submit and start one takes about
# 10 us.
LINK = 0.8 * 31.5e9  # bytes per second
COPY_SECONDS = 10e-6

STEP_SECONDS = 2 * NUM_PARAMETERS / BANDWIDTH  # the weights are read once a step
TOKEN_SECONDS = 2 * NUM_PARAMETERS / FLOP_RATE
CONTEXT_SECONDS = KV_BYTES / BANDWIDTH  # a token in the cache is read once a step


def step_seconds(num_tokens: float, num_context: float) -> float:
    """Return how long a step of `num_tokens` takes whose sequences have `num_context` in the cache."""
    return STEP_SECONDS + num_tokens * TOKEN_SECONDS + num_context * CONTEXT_SECONDS


def swap_seconds(num_blocks: float, block_size: int, copies_per_block: int) -> float:
    """Return how long that many blocks take one way, each in so many copies."""
    return num_blocks * (copies_per_block * COPY_SECONDS + block_size * KV_BYTES / LINK)
