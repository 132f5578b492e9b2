// What native/abi/keys.h names, for those who stand on it.
#pragma once

#include "master/key_table.h"

struct mc_keys {
  mc::KeyTable table;
};
