# SPDX-License-Identifier: BSD-3-Clause
"""What the compiled modules are made of: declarations of verbs and of pyverbs' objects.

`core/` goes into `_core`, `nic/` into `_nic`.
"""
