#include "server/storage/checkpoint_reader.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checkpoint/file_digest.h"
#include "proto/checkpoint/manifest.h"

#include "server/base/status_macros.h"
#include "server/storage/damage.h"

namespace ballast {
namespace {

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
  if ((*file)->bytes() > kMostManifestBytes) {
    return Damaged(path, "manifest", absl::StrCat("it has ", (*file)->bytes(), " bytes"));
  }
  std::string text((*file)->bytes(), '\0');
  RETURN_IF_ERROR((*file)->Read(0, {reinterpret_cast<std::byte*>(text.data()), text.size()}));
  return text;
}

}  // namespace

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

absl::StatusOr<FileReader> CheckpointReader::OpenFile(absl::string_view name,
                                                      std::vector<absl::Span<std::byte>> pieces) const {
  const v1::CheckpointFile* const entry = FindFile(manifest_, name);
  const std::string path = absl::StrCat(folder_, "/", name);
  if (entry == nullptr)
    return Damaged(absl::StrCat(folder_, "/", kManifestName), "manifest", absl::StrCat("it lists no ", name));
  uint64_t wanted = 0;
  for (const auto& piece : pieces) wanted += piece.size();
  if (wanted != entry->bytes()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has ", entry->bytes(), " bytes; wanted are ", wanted));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<InputFile> file, OpenSized(fs_, path, entry->bytes()));
  return FileReader(std::move(file), path, entry, std::move(pieces));
}

}  // namespace ballast
