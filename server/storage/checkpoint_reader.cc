#include "server/storage/checkpoint_reader.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checkpoint/file_digest.h"
#include "proto/checkpoint/manifest.h"
#include "proto/checksum.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

// More than any manifest has: 70e9 parameters have 4 MB of checksums, 100,000 tensors 20 MB of names and counts.
constexpr uint64_t kMostText = uint64_t{1} << 30;

// Where a status has DamageOf.
constexpr absl::string_view kDamageUrl = "ballast/damage";

absl::Status WithDamage(absl::Status status, absl::string_view damage) {
  status.SetPayload(kDamageUrl, absl::Cord(damage));
  return status;
}

absl::Status Damaged(const std::string& path, absl::string_view damage, const std::string& how) {
  return WithDamage(absl::DataLossError(absl::StrCat(path, " is damaged: ", how)), damage);
}

// A missing file is damage like any other: the next older checkpoint is taken.
absl::Status AsDamage(absl::Status status, const std::string& path) {
  return absl::IsNotFound(status) ? Damaged(path, "missing", "it is missing") : status;
}

absl::StatusOr<std::unique_ptr<InputFile>> OpenSized(Fs* fs, const std::string& path, uint64_t bytes) {
  auto file = fs->Open(path);
  if (!file.ok()) return AsDamage(file.status(), path);
  if ((*file)->bytes() == bytes) return file;
  return Damaged(path, "truncated", absl::StrCat("it has ", (*file)->bytes(), " bytes, and had ", bytes));
}

absl::StatusOr<std::string> ReadWhole(Fs* fs, const std::string& path) {
  auto file = fs->Open(path);
  if (!file.ok()) return AsDamage(file.status(), path);
  if ((*file)->bytes() > kMostText) {
    return Damaged(path, "manifest", absl::StrCat("it has ", (*file)->bytes(), " bytes"));
  }
  std::string text((*file)->bytes(), '\0');
  RETURN_IF_ERROR((*file)->Read(0, {reinterpret_cast<std::byte*>(text.data()), text.size()}));
  return text;
}

// Spreads bytes over pieces of memory.
class Scatter {
 public:
  explicit Scatter(const std::vector<absl::Span<std::byte>>& pieces) : pieces_(pieces) {}
  void Add(absl::Span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto rest = pieces_[piece_].subspan(at_);
      const size_t taken = std::min(rest.size(), bytes.size());
      if (taken > 0) std::memcpy(rest.data(), bytes.data(), taken);
      bytes.remove_prefix(taken);
      at_ += taken;
      if (taken < rest.size()) continue;
      ++piece_;
      at_ = 0;
    }
  }

 private:
  const std::vector<absl::Span<std::byte>>& pieces_;
  size_t piece_ = 0, at_ = 0;
};

}  // namespace

std::string_view DamageOf(const absl::Status& status) {
  for (const char* damage : {"checksum", "truncated", "missing", "manifest", "version"}) {
    if (status.GetPayload(kDamageUrl) == absl::Cord(damage)) return damage;
  }
  return "other";
}

absl::StatusOr<CheckpointReader> CheckpointReader::Open(Fs* fs, const std::string& folder) {
  ASSIGN_OR_RETURN(const std::string manifest_text, ReadWhole(fs, absl::StrCat(folder, "/", kManifestName)));
  ASSIGN_OR_RETURN(const std::string sums_text, ReadWhole(fs, absl::StrCat(folder, "/", kSumsName)));
  auto manifest = ReadManifest(manifest_text, sums_text, folder);
  if (!manifest.ok()) {
    return WithDamage(manifest.status(), absl::IsFailedPrecondition(manifest.status()) ? "version" : "manifest");
  }
  for (const v1::CheckpointFile& file : manifest->files()) {
    RETURN_IF_ERROR(OpenSized(fs, absl::StrCat(folder, "/", file.name()), file.bytes()).status());
  }
  return CheckpointReader(fs, folder, *std::move(manifest));
}

bool CheckpointReader::Has(absl::string_view name) const { return FindFile(manifest_, name) != nullptr; }

absl::StatusOr<std::string> CheckpointReader::ReadText(absl::string_view name) const {
  const v1::CheckpointFile* const entry = FindFile(manifest_, name);
  const std::string path = absl::StrCat(folder_, "/", name);
  if (entry == nullptr)
    return Damaged(absl::StrCat(folder_, "/", kManifestName), "manifest", absl::StrCat("it lists no ", name));
  ASSIGN_OR_RETURN(std::string text, ReadWhole(fs_, path));
  if (DigestOf("", text).sha256() == entry->sha256()) return text;
  return Damaged(path, "checksum", "its SHA-256 is not what the manifest says");
}

absl::Status CheckpointReader::ReadInto(absl::string_view name, const std::vector<absl::Span<std::byte>>& pieces,
                                        const DiskBuffer& buffer) const {
  const v1::CheckpointFile* const entry = FindFile(manifest_, name);
  const std::string path = absl::StrCat(folder_, "/", name);
  if (entry == nullptr)
    return Damaged(absl::StrCat(folder_, "/", kManifestName), "manifest", absl::StrCat("it lists no ", name));
  uint64_t wanted = 0;
  for (const auto& piece : pieces) wanted += piece.size();
  if (wanted != entry->bytes()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has ", entry->bytes(), " bytes; wanted are ", wanted));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<InputFile> file, OpenSized(fs_, path, entry->bytes()));
  Scatter scatter(pieces);
  for (uint64_t begin = 0; begin < wanted; begin += DiskBuffer::kBytes) {
    const auto block = buffer.bytes().first(static_cast<size_t>(std::min(wanted - begin, DiskBuffer::kBytes)));
    RETURN_IF_ERROR(file->Read(begin, block));
    for (uint64_t at = 0; at < block.size(); at += kChecksumBlock) {
      const auto mib = block.subspan(at, kChecksumBlock);
      const uint64_t index = (begin + at) / kChecksumBlock;
      if (Crc32c(mib) == entry->crc32c(static_cast<int>(index))) continue;
      return Damaged(path, "checksum",
                     absl::StrCat("MiB ", index, " of it has not the checksum that the manifest says"));
    }
    scatter.Add(block);
  }
  return absl::OkStatus();
}

}  // namespace ballast
