#include "server/follow/version_file.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "proto/checkpoint/file_digest.h"
#include "proto/checkpoint/safetensors_header.h"
#include "proto/checksum.h"

#include "server/base/status_macros.h"
#include "server/storage/damage.h"

namespace ballast {
namespace {

constexpr uint64_t kMostHeaderBytes = 100'000'000;  // readers of the format refuse more
constexpr std::string_view kChecksum = "\"checksum\":\"", kUnsealed = "00000000";

using Metadata = std::map<std::string, std::string>;

// A tensor of the file: of the run's, its codes or its scales.
struct Part {
  uint32_t tensor = 0;
  bool of_scales = false;
  uint64_t begin = 0, bytes = 0;
};

// By width, so that each number lies as its type wants it.
std::vector<Part> PartsOf(const RunSpec& spec) {
  std::vector<Part> parts;
  uint64_t end = 0;
  const auto add = [&](uint32_t tensor, bool of_scales, uint64_t bytes) {
    parts.push_back({tensor, of_scales, end, bytes});
    end += bytes;
  };
  for (const uint64_t width : {4, 2, 1}) {
    for (uint32_t i = 0; i < spec.tensors.size(); ++i) {
      const TensorSpec& t = spec.tensors[i];
      if (width == sizeof(float) && ScaleCount(t) > 0) add(i, true, ScaleCount(t) * sizeof(float));
      if (width == WireBytes(t.serving_format)) add(i, false, ServingBytes(t));
    }
  }
  return parts;
}

// The format's numbers where files have a name for them, else its words.
absl::string_view DtypeOf(const TensorSpec& t) {
  const kernels::WireFormat& format = kernels::WireFormats()[static_cast<size_t>(t.serving_format)];
  constexpr std::pair<absl::string_view, absl::string_view> kNamed[] = {
      {"fp32", "F32"},         {"bf16", "BF16"},        {"fp16", "F16"},
      {"fp8-e4m3", "F8_E4M3"}, {"fp8-e5m2", "F8_E5M2"}, {"int8", "I8"}};
  for (const auto& [name, dtype] : kNamed) {
    if (absl::StartsWith(format.name, name)) return dtype;
  }
  return format.bytes == 1 ? "U8" : format.bytes == 2 ? "U16" : "U32";
}

std::string ScalesName(const std::set<absl::string_view>& names, const TensorSpec& t) {
  std::string name = t.name;
  do name += ".scales";
  while (names.contains(name));
  return name;
}

// The header with its checksum, which is of all of it with zeros in that place. Empty: it has no place for one.
std::string Sealed(std::string header) {
  const size_t found = header.find(kChecksum);
  if (found == std::string::npos || header.size() < found + kChecksum.size() + kUnsealed.size()) return "";
  const size_t at = found + kChecksum.size();
  header.replace(at, kUnsealed.size(), kUnsealed);
  const uint32_t sum = Crc32c({reinterpret_cast<const std::byte*>(header.data()), header.size()});
  header.replace(at, kUnsealed.size(), absl::StrFormat("%08x", sum));
  return header;
}

Metadata ToMetadata(const VersionFileInfo& info) {
  std::string digests, sums;
  for (const uint64_t digest : info.digests) absl::StrAppendFormat(&digests, "%016x", digest);
  for (const uint32_t sum : info.sums) absl::StrAppendFormat(&sums, "%08x", sum);
  Metadata metadata{{"checksum", std::string(kUnsealed)},
                    {"run", info.run_id},
                    {"tag", info.tag},
                    {"step", absl::StrCat(info.id.step)},
                    {"generation", absl::StrCat(info.id.generation)},
                    {"epoch", absl::StrCat(info.id.epoch)},
                    {"closed_unix_s", absl::StrFormat("%.7f", info.closed_unix_s)},
                    {"tagged_unix_s", absl::StrFormat("%.7f", info.tagged_unix_s)},
                    {"digests", std::move(digests)},
                    {"crc32c", std::move(sums)}};
  if (info.mark != 0) metadata["mark"] = absl::StrCat(info.mark);
  return metadata;
}

// A header's metadata as VersionHeader writes them, in which nothing is escaped; empty: they are written otherwise.
Metadata ParseMetadata(absl::string_view header) {
  Metadata metadata;
  if (!absl::ConsumePrefix(&header, absl::StripSuffix(SafetensorsHeader::kBegin, "}"))) return {};
  while (absl::ConsumePrefix(&header, ",\"")) {
    const size_t middle = header.find("\":\""), end = header.find('"', middle + 3);
    if (middle == absl::string_view::npos || end == absl::string_view::npos) return {};
    metadata[std::string(header.substr(0, middle))] = std::string(header.substr(middle + 3, end - middle - 3));
    header.remove_prefix(end + 1);
  }
  return metadata;
}

// Numbers of `digits` hexadecimal digits each.
template <typename Number>
bool ParseAll(absl::string_view text, size_t digits, std::vector<Number>* numbers) {
  if (text.size() % digits != 0) return false;
  for (; !text.empty(); text.remove_prefix(digits)) {
    if (!absl::SimpleHexAtoi(text.substr(0, digits), &numbers->emplace_back())) return false;
  }
  return true;
}

// What ToMetadata made these of; none: they are not whole.
std::optional<VersionFileInfo> FromMetadata(Metadata metadata) {
  VersionFileInfo info{.run_id = metadata["run"], .tag = metadata["tag"]};
  const bool marked = metadata.contains("mark");
  const bool read = (!marked || absl::SimpleAtoi(metadata["mark"], &info.mark)) &&
                    absl::SimpleAtoi(metadata["step"], &info.id.step) &&
                    absl::SimpleAtoi(metadata["generation"], &info.id.generation) &&
                    absl::SimpleAtoi(metadata["epoch"], &info.id.epoch) &&
                    absl::SimpleAtod(metadata["closed_unix_s"], &info.closed_unix_s) &&
                    absl::SimpleAtod(metadata["tagged_unix_s"], &info.tagged_unix_s) &&
                    ParseAll(metadata["digests"], 16, &info.digests) && ParseAll(metadata["crc32c"], 8, &info.sums);
  return read ? std::optional(std::move(info)) : std::nullopt;
}

absl::Span<const std::byte> BytesOfScales(absl::Span<const float> scales) {
  return {reinterpret_cast<const std::byte*>(scales.data()), scales.size() * sizeof(float)};
}

}  // namespace

uint64_t VersionDataBytes(const RunSpec& spec) {
  uint64_t bytes = 0;
  for (const TensorSpec& t : spec.tensors) bytes += ServingBytes(t) + ScaleCount(t) * sizeof(float);
  return bytes;
}

std::vector<absl::Span<const std::byte>> VersionData(const RunSpec& spec, const std::vector<uint64_t>& chunk_starts,
                                                     const WeightVersion& version) {
  std::vector<absl::Span<const std::byte>> data;
  for (const Part& part : PartsOf(spec)) {
    const TensorSpec& t = spec.tensors[part.tensor];
    uint64_t rows = 0;  // of which the scales are there
    for (uint64_t c = chunk_starts[part.tensor]; c < chunk_starts[part.tensor + 1]; ++c) {
      const VersionPiece& piece = *version.pieces[c];
      if (!part.of_scales) {
        data.push_back(piece.codes());
        continue;
      }
      // A row that is cut has its scale in each of its chunks.
      const uint64_t chunk = c - chunk_starts[part.tensor];
      const ScaleRange range = ScalesOf(t, ChunkBegin(spec, chunk), ChunkEnd(spec, t, chunk));
      data.push_back(BytesOfScales(absl::MakeConstSpan(piece.scales).subspan(rows - range.first)));
      rows = range.last;
    }
  }
  return data;
}

std::vector<uint32_t> DataSums(const std::vector<absl::Span<const std::byte>>& data) {
  std::vector<uint32_t> sums;
  uint64_t left = 0;  // of the MiB under way
  for (absl::Span<const std::byte> bytes : data) {
    while (!bytes.empty()) {
      if (left == 0) {
        sums.push_back(Crc32c({}));
        left = kChecksumBlock;
      }
      const auto some = bytes.first(std::min<uint64_t>(left, bytes.size()));
      sums.back() = ExtendCrc32c(sums.back(), some);
      left -= some.size();
      bytes.remove_prefix(some.size());
    }
  }
  return sums;
}

std::string VersionHeader(const RunSpec& spec, const VersionFileInfo& info) {
  std::set<absl::string_view> names;
  for (const TensorSpec& t : spec.tensors) names.insert(t.name);
  SafetensorsHeader header(ToMetadata(info));
  for (const Part& part : PartsOf(spec)) {
    const TensorSpec& t = spec.tensors[part.tensor];
    if (part.of_scales) {
      const uint64_t rows[] = {ScaleCount(t)};
      header.Add(ScalesName(names, t), "F32", rows, part.bytes);
    } else {
      header.Add(t.name, DtypeOf(t), t.shape, part.bytes);
    }
  }
  return Sealed(std::move(header).Finish());
}

absl::StatusOr<std::unique_ptr<VersionFile>> VersionFile::Open(Fs* fs, const std::string& path, const RunSpec* spec) {
  ASSIGN_OR_RETURN(std::unique_ptr<InputFile> file, fs->Open(path));
  std::unique_ptr<VersionFile> made(new VersionFile(std::move(file), path, spec));
  RETURN_IF_ERROR(made->ReadHeader());
  made->places_.resize(spec->tensors.size());
  for (const Part& part : PartsOf(*spec)) {
    Place& place = made->places_[part.tensor];
    (part.of_scales ? place.scales : place.codes) = part.begin;
  }
  return made;
}

absl::Status VersionFile::ReadHeader() {
  uint64_t length = 0;
  if (file_->bytes() < sizeof(length)) return Damaged(path_, "truncated", "it has no header");
  RETURN_IF_ERROR(file_->Read(0, {reinterpret_cast<std::byte*>(&length), sizeof(length)}));
  if (length > kMostHeaderBytes || length > file_->bytes() - sizeof(length)) {
    return Damaged(path_, "truncated", absl::StrCat("its header has ", length, " bytes"));
  }
  std::string header(sizeof(length) + length, '\0');
  RETURN_IF_ERROR(file_->Read(0, {reinterpret_cast<std::byte*>(header.data()), header.size()}));
  const bool is_whole = Sealed(header) == header;
  auto info = FromMetadata(ParseMetadata(absl::string_view(header).substr(sizeof(length))));
  if (!is_whole || !info) return Damaged(path_, "checksum", "its header is not as it was written");
  info_ = *std::move(info);
  data_begin_ = header.size();
  data_bytes_ = VersionDataBytes(*spec_);
  const uint64_t blocks = (data_bytes_ + kChecksumBlock - 1) / kChecksumBlock;
  if (info_.digests.size() != spec_->tensors.size() || info_.sums.size() != blocks ||
      VersionHeader(*spec_, info_) != header) {
    return absl::FailedPreconditionError(
        absl::StrCat("the version of step ", info_.id.step, " is of another spec than run '", spec_->run_id,
                     "' has now (other tensors, or formats); any safetensors reader reads it: ", path_));
  }
  if (file_->bytes() == data_begin_ + data_bytes_) return absl::OkStatus();
  return Damaged(path_, "truncated",
                 absl::StrCat("it has ", file_->bytes(), " bytes instead of ", data_begin_ + data_bytes_));
}

absl::Status VersionFile::ReadBlock(uint64_t number, Block* block) {
  const uint64_t begin = number * kChecksumBlock;
  block->number = ~uint64_t{0};
  block->bytes.resize(std::min(kChecksumBlock, data_bytes_ - begin));
  RETURN_IF_ERROR(file_->Read(data_begin_ + begin, absl::MakeSpan(block->bytes)));
  if (Crc32c(block->bytes) != info_.sums[number]) {
    return Damaged(path_, "checksum", absl::StrCat("MiB ", number, " of its data is not as it was written"));
  }
  block->number = number;
  return absl::OkStatus();
}

absl::Status VersionFile::ReadData(uint64_t begin, absl::Span<std::byte> to, Block* block) {
  while (!to.empty()) {
    const uint64_t number = begin / kChecksumBlock, in_block = begin % kChecksumBlock;
    if (block->number != number) RETURN_IF_ERROR(ReadBlock(number, block));
    const auto some = to.first(std::min<uint64_t>(to.size(), block->bytes.size() - in_block));
    std::memcpy(some.data(), block->bytes.data() + in_block, some.size());
    begin += some.size();
    to.remove_prefix(some.size());
  }
  return absl::OkStatus();
}

absl::StatusOr<VersionPiecePtr> VersionFile::Read(uint32_t tensor, uint64_t chunk) {
  const TensorSpec& t = spec_->tensors[tensor];
  const uint64_t first = ChunkBegin(*spec_, chunk), last = ChunkEnd(*spec_, t, chunk);
  const uint64_t width = WireBytes(t.serving_format);
  auto memory = std::make_unique_for_overwrite<std::byte[]>((last - first) * width);
  const absl::Span<std::byte> codes(memory.get(), (last - first) * width);
  RETURN_IF_ERROR(ReadData(places_[tensor].codes + first * width, codes, &codes_));
  const ScaleRange rows = ScalesOf(t, first, last);
  std::vector<float> scales(rows.size());
  const absl::Span<std::byte> in_bytes(reinterpret_cast<std::byte*>(scales.data()), scales.size() * sizeof(float));
  RETURN_IF_ERROR(ReadData(places_[tensor].scales + rows.first * sizeof(float), in_bytes, &scales_));
  const uint32_t crc = Crc32c(codes);
  return std::make_shared<const VersionPiece>(
      VersionPiece{.memory = std::move(memory), .size = codes.size(), .scales = std::move(scales), .crc32c = crc});
}

}  // namespace ballast
