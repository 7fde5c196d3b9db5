"""Images that are refused."""

from __future__ import annotations

import pytest
import torch

from fdp.data.images import examples
from fdp.types import FdpError


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_image_that_is_not_finite_is_named(value: float) -> None:
    image = torch.zeros(5, 1, 2, 2)
    image[3, 0, 1, 1] = value
    with pytest.raises(FdpError, match="NaN or infinity in image 3"):
        examples(image, torch.zeros(5), where="here")
    with pytest.raises(FdpError, match="expected as many labels"):
        examples(image, torch.zeros(4), where="here")
