"""Loading batches: torch's DataLoader by signature, with a position and lineage."""

from trainpath.loader.loader import DataLoader
from trainpath.loader.observed import observed
from trainpath.loader.prefetch import prefetch
from trainpath.loader.sources import TarDataset

__all__ = ["DataLoader", "TarDataset", "observed", "prefetch"]
