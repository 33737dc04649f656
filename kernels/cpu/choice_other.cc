#include "kernels/cpu/tables.h"

namespace ballast::kernels {

std::span<const LaneTables* const> UsableLanes() {
  static const LaneTables* const kLanes[] = {&ScalarTables()};
  return kLanes;
}

}  // namespace ballast::kernels
