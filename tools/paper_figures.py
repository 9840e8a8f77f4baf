"""All figures of reproduce_paper together: a run that several need is made once."""

from concurrent.futures import Future

from tools.paper_memory import MeanBatch, MemoryShare, Sharing
from tools.paper_paged import Case, PagedRun
from tools.paper_table import Sizes, Submit, Table
from tools.paper_time import BlockSize, DesignText, FirstToken, SwapOrRecompute


class Figures:
    """All figures; their runs are submitted, each once."""

    def __init__(self, submit: Submit, sizes: Sizes) -> None:
        """Make them, the longest runs first."""
        futures: dict[Case, Future[PagedRun]] = {}

        def submit_once(case: Case) -> Future[PagedRun]:
            if case not in futures:
                futures[case] = submit(case)
            return futures[case]

        self.sharing = Sharing(submit_once, sizes)
        self.batch = MeanBatch(submit_once, sizes)
        self.share = MemoryShare(submit_once, sizes)
        self.block_size = BlockSize(submit_once, sizes)
        self.swap = SwapOrRecompute(submit_once, sizes)
        self.first_token = FirstToken(submit_once, sizes)
        self.design = DesignText(submit_once, sizes, self.share, self.first_token.capacity_run)

    def tables(self) -> list[Table]:
        """Return all tables in the order of the paper."""
        figures = (self.share, self.batch, self.sharing, self.block_size, self.swap)
        return [figure.table() for figure in (*figures, self.design, self.first_token)]
