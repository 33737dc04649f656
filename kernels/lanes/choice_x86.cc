#include <array>

#include "kernels/lanes/tables.h"

namespace ballast::kernels {

std::span<const LaneTables* const> UsableLanes() {
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const std::array lanes = {&ScalarTables(), avx2 ? &ScalarForAvx2Tables() : nullptr};
  return std::span(lanes).first(avx2 ? 2 : 1);
}

}  // namespace ballast::kernels
