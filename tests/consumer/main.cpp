// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "steadynorm/types.h"

int main() {
  std::puts(steadynorm::to_string(steadynorm::Layout::channels_last));  // placeholder: a forward call
}
