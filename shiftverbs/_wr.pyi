# SPDX-License-Identifier: BSD-3-Clause
"""Types of the work requests' classes."""

from typing import Any

SGE: Any
SendWR: Any
RecvWR: Any
