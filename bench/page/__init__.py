# SPDX-License-Identifier: Apache-2.0
"""The performance page, made from bench/results: `make report`. Needs no GPU and no torch."""
