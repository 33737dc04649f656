// Reads the files in which MNIST and Fashion-MNIST come, as they are or compressed by gzip:
//
//   00 00 08 R     bytes, in an array of R dimensions
//   R x uint32     the dimensions, big end first
//   bytes          row-major
//
// so 00 00 08 01, 00 00 00 03, 07 02 09 holds the three labels 7, 2, 9.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast::examples {

struct IdxArray {
  std::vector<uint32_t> shape;
  std::vector<uint8_t> values;
};

// NOT_FOUND: no such file. INVALID_ARGUMENT: not such a file, cut off, or longer than its dimensions say.
absl::StatusOr<IdxArray> ReadIdx(const std::string& path);

}  // namespace ballast::examples
