"""What is masked before anything is written: by names (`names`), by shapes inside texts (`shapes`), by what is known."""

from __future__ import annotations

from rolltape.record.secrets.masking import MASK, Secrets

__all__ = ["MASK", "Secrets"]
