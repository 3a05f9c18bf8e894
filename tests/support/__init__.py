# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks share: the named cases, the reference in double, bounds, comparison of bits."""
