#include "server/storage/journal_files.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

constexpr absl::string_view kSegmentPrefix = "segment-";
// A head has at most a value for each of an optimizer's settings, and two names.
constexpr uint32_t kMostHead = 64 << 10;

absl::Status BadRecord(const std::string& path, absl::string_view why) {
  return absl::DataLossError(absl::StrCat(path, " is damaged: a record ", why));
}

// A later one: who has copied files, or changed them, may have them continue one another in a circle.
const JournalFile* WhichContinues(const std::vector<JournalFile>& files, const JournalFile& last) {
  for (const JournalFile& file : files) {
    if (file.number > last.number && file.head.continues == last.head.base) return &file;
  }
  return nullptr;
}

// A file that goes on from one that is not there, behind the chain's last.
absl::Status CheckUnbroken(const std::vector<JournalFile>& files, const std::vector<JournalFile>& chain) {
  for (const JournalFile& file : files) {
    if (file.number <= chain.back().number || file.head.continues == 0) continue;
    const bool follows = std::any_of(files.begin(), files.end(), [&](const JournalFile& other) {
      return other.number > chain.back().number && other.head.base == file.head.continues;
    });
    if (follows) continue;
    return absl::DataLossError(
        absl::StrCat(file.path, " goes on from a file that is missing or damaged: it comes after ", chain.back().path));
  }
  return absl::OkStatus();
}

}  // namespace

std::string SegmentName(uint64_t number) { return absl::StrFormat("%s%012d", kSegmentPrefix, number); }

std::optional<uint64_t> ParseSegmentName(absl::string_view name) {
  uint64_t number = 0;
  if (!absl::StartsWith(name, kSegmentPrefix) || !absl::SimpleAtoi(name.substr(kSegmentPrefix.size()), &number) ||
      SegmentName(number) != name) {
    return std::nullopt;
  }
  return number;
}

absl::StatusOr<uint64_t> NewestSegment(Fs* fs, const std::string& folder) {
  ASSIGN_OR_RETURN(const std::vector<Fs::Entry> entries, fs->List(folder));
  uint64_t newest = 0;
  for (const Fs::Entry& entry : entries) newest = std::max(newest, ParseSegmentName(entry.name).value_or(0));
  return newest;
}

absl::StatusOr<std::vector<JournalFile>> ListJournal(Fs* fs, const std::string& folder) {
  const auto entries = fs->List(folder);
  if (absl::IsNotFound(entries.status())) return std::vector<JournalFile>();
  RETURN_IF_ERROR(entries.status());
  std::vector<JournalFile> files;
  for (const Fs::Entry& entry : *entries) {
    const std::optional<uint64_t> number = ParseSegmentName(entry.name);
    if (!number) continue;
    if (entry.kind != Fs::Kind::kFile) {
      return absl::FailedPreconditionError(absl::StrCat(
          folder, "/", entry.name,
          " has the name of a file of the journal and is none, and no link is followed: put the file itself there, or "
          "move it away to go on without the steps in it"));
    }
    JournalFile file{.number = *number, .path = absl::StrCat(folder, "/", entry.name), .head = {}};
    auto reader = RecordReader::Open(fs, file.path, file.number);
    if (!reader.ok() && !absl::IsOutOfRange(reader.status())) return reader.status();
    if (reader.ok()) file.head = reader->segment();
    files.push_back(std::move(file));
  }
  return files;  // List is by name
}

absl::StatusOr<std::vector<JournalFile>> JournalChain(Fs* fs, const std::string& folder, uint64_t base) {
  std::vector<JournalFile> chain;
  if (base == 0) return chain;
  ASSIGN_OR_RETURN(const std::vector<JournalFile> files, ListJournal(fs, folder));
  const auto first =
      std::find_if(files.begin(), files.end(), [&](const JournalFile& file) { return file.head.base == base; });
  if (first == files.end()) return chain;
  chain.push_back(*first);
  while (const JournalFile* const next = WhichContinues(files, chain.back())) chain.push_back(*next);
  RETURN_IF_ERROR(CheckUnbroken(files, chain));
  return chain;
}

absl::Status RemoveJournal(Fs* fs, const std::string& folder) {
  const auto entries = fs->List(folder);
  if (absl::IsNotFound(entries.status())) return absl::OkStatus();
  RETURN_IF_ERROR(entries.status());
  for (const Fs::Entry& entry : *entries) {
    if (entry.kind != Fs::Kind::kFile || !ParseSegmentName(entry.name)) {
      return absl::FailedPreconditionError(absl::StrCat(
          folder, " is left: ", entry.name, " in it is no file of a journal; move it away, and remove the folder"));
    }
    RETURN_IF_ERROR(fs->RemoveFile(absl::StrCat(folder, "/", entry.name)));
  }
  return fs->RemoveFolder(folder);
}

absl::StatusOr<RecordReader> RecordReader::Open(Fs* fs, const std::string& path, uint64_t number) {
  ASSIGN_OR_RETURN(FrameReader frames, FrameReader::Open(fs, path, number));
  RecordReader reader(std::move(frames));
  ASSIGN_OR_RETURN(const std::string text, reader.ReadHead());
  auto head = ParseSegmentHead(text, path);
  if (absl::IsFailedPrecondition(head.status())) return head.status();
  if (!head.ok()) return BadRecord(path, head.status().message());
  reader.segment_ = *std::move(head);
  return reader;
}

absl::StatusOr<std::string> RecordReader::ReadHead() {
  uint32_t bytes = 0;
  RETURN_IF_ERROR(frames_.Read({reinterpret_cast<std::byte*>(&bytes), sizeof(bytes)}));
  if (bytes > kMostHead) return BadRecord(path(), absl::StrCat("has a head of ", bytes, " bytes"));
  std::string text(bytes, '\0');
  RETURN_IF_ERROR(frames_.Read({reinterpret_cast<std::byte*>(text.data()), text.size()}));
  return text;
}

absl::StatusOr<JournalRecord> RecordReader::Next() {
  RETURN_IF_ERROR(SkipBody());
  ASSIGN_OR_RETURN(const std::string text, ReadHead());
  auto record = ParseRecord(text, path());
  if (absl::IsFailedPrecondition(record.status())) return record.status();
  if (!record.ok()) return BadRecord(path(), record.status().message());
  body_left_ = record->body_bytes;
  return record;
}

absl::Status RecordReader::Read(absl::Span<std::byte> to) {
  if (to.size() > body_left_) return BadRecord(path(), "is shorter than it must be");
  RETURN_IF_ERROR(frames_.Read(to));
  body_left_ -= to.size();
  return absl::OkStatus();
}

absl::Status RecordReader::SkipBody() {
  RETURN_IF_ERROR(frames_.Skip(body_left_));
  body_left_ = 0;
  return absl::OkStatus();
}

}  // namespace ballast
