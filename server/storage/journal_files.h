// The files of a run's journal: which there are, which of them go on from a checkpoint, and the records in them.
//
//   ASSIGN_OR_RETURN(auto chain, JournalChain(fs, folder, base));
//   for (const JournalFile& file : chain) ... ASSIGN_OR_RETURN(RecordReader reader, RecordReader::Open(fs, file.path, file.number));
//
// Thread-safe; a reader is used by one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "server/storage/fs.h"
#include "server/storage/journal_frames.h"
#include "server/storage/journal_record.h"

namespace ballast {

inline constexpr absl::string_view kJournalFolder = "journal";  // in a run's

struct JournalFile {
  uint64_t number = 0;
  std::string path;
  SegmentHead head = {};  // empty where its first record is not there: a crash came before
};

// "segment-000000000007"
std::string SegmentName(uint64_t number);
// Of a file's name; none: it is not of a journal.
std::optional<uint64_t> ParseSegmentName(absl::string_view name);
// 0: there is none.
absl::StatusOr<uint64_t> NewestSegment(Fs* fs, const std::string& folder);
// By number, ascending; none where the folder is not there.
absl::StatusOr<std::vector<JournalFile>> ListJournal(Fs* fs, const std::string& folder);
// The files that go on from the checkpoint of this identity, in turn; none: there are none. DATA_LOSS: one in the middle
// is missing. FAILED_PRECONDITION: a later version wrote one.
absl::StatusOr<std::vector<JournalFile>> JournalChain(Fs* fs, const std::string& folder, uint64_t base);

// Removes the folder with its files; OK where it is not there. FAILED_PRECONDITION: something else is in it.
absl::Status RemoveJournal(Fs* fs, const std::string& folder);

class RecordReader {
 public:
  // Reads the file's first record, the segment's. OUT_OF_RANGE: it is not there; FAILED_PRECONDITION: a later version
  // wrote it.
  static absl::StatusOr<RecordReader> Open(Fs* fs, const std::string& path, uint64_t number);

  // The next record's head; what was not read of the last one's body is passed over. OUT_OF_RANGE: there is no whole head.
  absl::StatusOr<JournalRecord> Next();
  // Of the body; whole calls, in turn. As FrameReader::Read.
  absl::Status Read(absl::Span<std::byte> to);
  absl::Status SkipBody();
  const SegmentHead& segment() const { return segment_; }
  const std::string& path() const { return frames_.path(); }

 private:
  absl::StatusOr<std::string> ReadHead();
  explicit RecordReader(FrameReader frames) : frames_(std::move(frames)) {}

  FrameReader frames_;
  SegmentHead segment_;
  uint64_t body_left_ = 0;
};

}  // namespace ballast
