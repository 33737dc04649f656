#include "client/cpp/examples/idx_file.h"

#include <zlib.h>

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"

namespace ballast::examples {
namespace {

constexpr size_t kMostDimensions = 4;
constexpr uint64_t kMostBytes = 1 << 30;

using File = std::unique_ptr<gzFile_s, decltype(&gzclose)>;

// Whether all of it was there. gzread also reads what is not compressed.
bool Read(gzFile file, void* to, uint64_t bytes) {
  return gzread(file, to, static_cast<unsigned>(bytes)) == static_cast<int>(bytes);
}

}  // namespace

absl::StatusOr<IdxArray> ReadIdx(const std::string& path) {
  const auto bad = [&](const auto&... what) { return absl::InvalidArgumentError(absl::StrCat(path, ": ", what...)); };
  const File file(gzopen(path.c_str(), "rb"), &gzclose);
  if (file == nullptr) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  uint8_t magic[4] = {};
  if (!Read(file.get(), magic, sizeof magic) || magic[0] != 0 || magic[1] != 0) return bad("is no idx file");
  if (magic[2] != 8) return bad("holds elements of type ", magic[2], "; wanted: 8, bytes");
  if (magic[3] == 0 || magic[3] > kMostDimensions) {
    return bad("has ", magic[3], " dimensions; wanted: 1 to ", kMostDimensions);
  }
  IdxArray array;
  uint64_t bytes = 1;
  for (int i = 0; i < magic[3]; ++i) {
    uint8_t d[4] = {};
    if (!Read(file.get(), d, sizeof d)) return bad("ends within its dimensions");
    array.shape.push_back(uint32_t{d[0]} << 24 | uint32_t{d[1]} << 16 | uint32_t{d[2]} << 8 | d[3]);
    bytes = std::min(bytes * array.shape.back(), kMostBytes + 1);
  }
  if (bytes > kMostBytes) return bad("is larger than ", kMostBytes, " bytes");
  array.values.resize(bytes);
  if (!Read(file.get(), array.values.data(), bytes)) return bad("ends before the ", bytes, " bytes it announces");
  if (uint8_t more = 0; gzread(file.get(), &more, 1) != 0)
    return bad("is longer than the ", bytes, " bytes it announces");
  return array;
}

}  // namespace ballast::examples
