// What a journal says: the updates of tensors, the ends of steps, and rewinds, as they lie in its files
// (proto/CHECKPOINTS.md, "The journal"). Values.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/registry.h"

namespace ballast {

// One update of a tensor, with all that it is made of but the gradient, which is the record's body: reduced, in this
// format.
struct JournaledUpdate {
  uint64_t step = 0;
  uint32_t tensor = 0;
  double gradient_divisor = 1;
  float clip = 1;
  bool full_statistics = false;
  std::vector<double> hyper = {};  // the group's, in the order of its kernel
  std::string gradient_format = {};
};

// A step closed. The body: run_bytes of what a checkpoint would know of the run, then the ranks' client_state.
struct JournaledEnd {
  uint64_t step = 0;
  uint64_t run_bytes = 0;
  bool averaged = false;  // the averages of tensors that it did not update were moved, too
};

// The steps since this one were undone, with the updates of a step that had not closed.
struct JournaledRewind {
  uint64_t to_step = 0;
  uint64_t generation = 0;  // since
};

struct JournalRecord {
  std::variant<JournaledUpdate, JournaledEnd, JournaledRewind> what = {};
  uint64_t body_bytes = 0;
};

// A file's first record: what it goes on from. Identities are random; 0: none.
struct SegmentHead {
  std::string run_id = {};
  std::string spec_sha256 = {};
  uint64_t base = 0;       // of the checkpoint of after_step, if that came to be written
  uint64_t continues = 0;  // base of the file before it, which ends with after_step; 0: a checkpoint comes before it
  uint64_t after_step = 0;
  uint32_t numerics = kernels::kNumerics;  // the edition of NUMERICS.md that its updates were made by
  std::string products = {};               // kernels::MatrixProduct::library, where updates depend on it
};

// The head as it lies in the stream, its length first; the body follows it.
std::string HeadText(const JournalRecord& record);
std::string HeadText(const SegmentHead& head);
// Without the length, of this file. INVALID_ARGUMENT: it is none of these. FAILED_PRECONDITION names the file: a later
// version wrote it.
absl::StatusOr<JournalRecord> ParseRecord(const std::string& text, const std::string& file);
absl::StatusOr<SegmentHead> ParseSegmentHead(const std::string& text, const std::string& file);

}  // namespace ballast
