// What a file has, read without the code under test; empty where there is none.
#pragma once

#include <fstream>
#include <iterator>
#include <string>

namespace ballast::testing {

inline std::string ContentOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace ballast::testing
