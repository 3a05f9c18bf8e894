// SPDX-License-Identifier: Apache-2.0
// placeholder
__global__ void forward_placeholder() {}
