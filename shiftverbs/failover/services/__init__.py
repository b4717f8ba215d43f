# SPDX-License-Identifier: BSD-3-Clause
"""What all connections of a process use: the control channel, the directory, keys, turns; and how they ask for it."""
