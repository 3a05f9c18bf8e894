// SPDX-License-Identifier: Apache-2.0
// placeholder
#include "steadynorm/problem.h"

namespace steadynorm {
const char* to_string(Layout layout) { return layout == Layout::contiguous ? "contiguous" : "channels_last"; }
}  // namespace steadynorm
