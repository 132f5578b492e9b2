// The bare declarations of native/abi as C++ sees them.
#pragma once

#include <cstdint>

extern "C" {
#include "abi/constants.h"
#include "abi/engine.h"
#include "abi/memory.h"
#include "abi/segment.h"
// Stands on both.
#include "abi/keys.h"
#include "abi/door.h"
#include "abi/pulls.h"
#include "abi/puts.h"
}
