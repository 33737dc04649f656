#include <array>

#include "kernels/cpu/tables.h"

namespace ballast::kernels {
namespace {

bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

std::span<const IsaTables* const> UsableIsas() {
  static const size_t count = HasAvx512() ? 3 : HasAvx2() ? 2 : 1;
  static const std::array<const IsaTables*, 3> tables = {&ScalarTables(), count > 1 ? &Avx2Tables() : nullptr,
                                                         count > 2 ? &Avx512Tables() : nullptr};
  return std::span(tables).first(count);
}

}  // namespace ballast::kernels
