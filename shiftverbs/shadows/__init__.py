# SPDX-License-Identifier: BSD-3-Clause
"""The resources behind the application's: our own handle on each NIC, and what was made there in its turn."""
