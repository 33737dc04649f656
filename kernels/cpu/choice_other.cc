#include "kernels/cpu/tables.h"

namespace ballast::kernels {

std::span<const IsaTables* const> UsableIsas() {
  static const IsaTables* const kLanes[] = {&ScalarTables()};
  return kLanes;
}

}  // namespace ballast::kernels
