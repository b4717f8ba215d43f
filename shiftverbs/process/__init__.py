# SPDX-License-Identifier: BSD-3-Clause
"""What any program with several threads needs, without verbs: log lines, waiting, the run directory."""
