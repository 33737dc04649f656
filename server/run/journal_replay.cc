#include "server/run/journal_replay.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/plan/plan.h"

namespace ballast {
namespace {

absl::Status NotOfRun(const std::string& path, const std::string& what) {
  return absl::DataLossError(absl::StrCat(path, " is damaged, or of another run: ", what));
}

// Reads records into a survey.
class Surveyor {
 public:
  Surveyor(std::vector<JournalFile> files, uint64_t base_step) : base_step_(base_step) {
    survey_.files = std::move(files);
    survey_.step = base_step;
  }

  // false: what follows does not count.
  absl::StatusOr<bool> Take(const JournalRecord& record, const std::string& path) {
    if (const auto* end = std::get_if<JournaledEnd>(&record.what)) return TakeEnd(end->step, path);
    if (const auto* rewind = std::get_if<JournaledRewind>(&record.what)) return TakeRewind(*rewind, path);
    return true;
  }
  uint64_t step() const { return survey_.step; }
  JournalSurvey Finish() {
    survey_.steps = static_cast<uint64_t>(std::count(survey_.stands.begin(), survey_.stands.end(), true));
    return std::move(survey_);
  }

 private:
  absl::StatusOr<bool> TakeEnd(uint64_t step, const std::string& path) {
    if (step != survey_.step + 1) {
      return NotOfRun(path, absl::StrCat("step ", step, " closes after step ", survey_.step));
    }
    survey_.step = step;
    survey_.stands.push_back(true);
    steps_.push_back(step);
    return true;
  }
  absl::StatusOr<bool> TakeRewind(const JournaledRewind& rewind, const std::string& path) {
    if (rewind.to_step > survey_.step) return NotOfRun(path, "a rewind leads to a later step");
    // The crash came before the rewind was carried out: the checkpoint would have been set aside.
    if (rewind.to_step < base_step_) return false;
    for (size_t i = 0; i < steps_.size(); ++i) {
      if (steps_[i] > rewind.to_step) survey_.stands[i] = false;
    }
    survey_.step = rewind.to_step;
    survey_.generation = std::max(survey_.generation, rewind.generation);
    survey_.stands.push_back(false);
    steps_.push_back(0);
    return true;
  }

  const uint64_t base_step_;
  JournalSurvey survey_;
  std::vector<uint64_t> steps_;  // by stretch; 0: it ended with a rewind
};

// The file's records, as far as they are whole.
absl::StatusOr<bool> SurveyFile(RecordReader* reader, Surveyor* surveyor, const std::function<void()>& progress) {
  while (true) {
    progress();
    const auto record = reader->Next();
    const absl::Status status = record.ok() ? reader->SkipBody() : record.status();
    if (absl::IsOutOfRange(status)) return true;
    RETURN_IF_ERROR(status);
    ASSIGN_OR_RETURN(const bool counts, surveyor->Take(*record, reader->path()));
    if (!counts) return false;
  }
}

absl::Status CheckUpdate(const RunSpec& spec, const JournaledUpdate& update, uint64_t body_bytes,
                         const std::string& path) {
  if (update.tensor >= spec.tensors.size()) {
    return NotOfRun(path, absl::StrCat("an update of tensor ", update.tensor));
  }
  const TensorSpec& tensor = spec.tensors[update.tensor];
  const auto& format = kernels::WireFormats()[static_cast<size_t>(SlabFormat(spec, tensor))];
  const uint64_t bytes = tensor.elements * WireBytes(SlabFormat(spec, tensor));
  const size_t settings = spec.groups[tensor.group].hyper.size();
  if (update.gradient_format == format.name && body_bytes == bytes && update.hyper.size() == settings) {
    return absl::OkStatus();
  }
  return NotOfRun(path, absl::StrCat("an update of tensor '", tensor.name, "' has ", body_bytes, " bytes of ",
                                     update.gradient_format, " and ", update.hyper.size(), " settings; wanted: ", bytes,
                                     " of ", format.name, " and ", settings));
}

// Carries records out until the survey's last stretch is done.
class Replayer {
 public:
  Replayer(const JournalTarget* target, const JournalSurvey* survey) : target_(*target), survey_(*survey) {}

  absl::Status Take(const JournalRecord& record, RecordReader* reader) {
    const bool stands = survey_.stands[stretch_];
    if (const auto* update = std::get_if<JournaledUpdate>(&record.what)) {
      return stands ? Update(*update, record.body_bytes, reader) : absl::OkStatus();
    }
    const auto* end = std::get_if<JournaledEnd>(&record.what);
    if (end != nullptr && stands && end->averaged) target_.average(end->step);
    if (end != nullptr && stands && end->step == survey_.step) {
      ASSIGN_OR_RETURN(last_, ReadEnd(*end, record.body_bytes, reader));
    }
    ++stretch_;
    return absl::OkStatus();
  }
  bool done() const { return stretch_ == survey_.stands.size(); }
  std::optional<CheckpointedRun>& last() { return last_; }

 private:
  absl::Status Update(const JournaledUpdate& update, uint64_t bytes, RecordReader* reader) {
    RETURN_IF_ERROR(CheckUpdate(*target_.spec, update, bytes, reader->path()));
    RETURN_IF_ERROR(reader->Read(target_.room(update.tensor).subspan(0, bytes)));
    target_.update(update);
    return absl::OkStatus();
  }
  absl::StatusOr<std::optional<CheckpointedRun>> ReadEnd(const JournaledEnd& end, uint64_t body_bytes,
                                                         RecordReader* reader) {
    if (end.run_bytes > body_bytes) return NotOfRun(reader->path(), "a step's end is cut");
    std::string bytes(end.run_bytes, '\0');
    RETURN_IF_ERROR(reader->Read({reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}));
    ASSIGN_OR_RETURN(CheckpointedRun run, target_.codec->read_run_bytes(*target_.spec, bytes, reader->path()));
    for (auto& state : run.memory.client_states) {
      if (!state) continue;
      RETURN_IF_ERROR(reader->Read({reinterpret_cast<std::byte*>(state->bytes.data()), state->bytes.size()}));
    }
    return std::optional<CheckpointedRun>(std::move(run));
  }

  const JournalTarget& target_;
  const JournalSurvey& survey_;
  size_t stretch_ = 0;
  std::optional<CheckpointedRun> last_;
};

// The updates are made again by this daemon's kernels: others would give other weights than the trainers have.
absl::Status CheckNumerics(const JournalFile& file, absl::string_view products) {
  const std::string& theirs = file.head.products;
  if (!theirs.empty() && theirs != products) {
    return absl::FailedPreconditionError(absl::StrCat(
        file.path, " has steps whose matrix products were made by ", theirs, "; this machine has ", products,
        ", which sums in another order: start the daemon where it was, and stop it with SIGTERM once the run is "
        "there; it then leaves a checkpoint of them, which any reads"));
  }
  if (file.head.numerics == kernels::kNumerics) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(file.path, " has steps of a daemon whose updates have other bits (edition ", file.head.numerics,
                   " of its numerics; this daemon has ", kernels::kNumerics,
                   "): start that version again, and stop it with SIGTERM once the run is there; it then leaves a "
                   "checkpoint of them, which any version reads"));
}

}  // namespace

absl::StatusOr<JournalSurvey> SurveyJournal(Fs* fs, std::vector<JournalFile> chain, uint64_t base_step,
                                            absl::string_view products, const std::function<void()>& progress) {
  const std::vector<JournalFile> files = chain;
  Surveyor surveyor(std::move(chain), base_step);
  for (const JournalFile& file : files) {
    // It was begun when the one before was on the disk, or when a restart had read of that what it had.
    if (file.head.after_step != surveyor.step()) {
      return absl::DataLossError(absl::StrCat(file.path, " goes on from step ", file.head.after_step,
                                              ", and what comes before it ends with step ", surveyor.step(),
                                              ": the end of the file before is missing"));
    }
    ASSIGN_OR_RETURN(RecordReader reader, RecordReader::Open(fs, file.path, file.number));
    ASSIGN_OR_RETURN(const bool counts, SurveyFile(&reader, &surveyor, progress));
    if (surveyor.step() != file.head.after_step) RETURN_IF_ERROR(CheckNumerics(file, products));
    if (!counts) break;
  }
  return surveyor.Finish();
}

absl::StatusOr<CheckpointedRun> ReplayJournal(const JournalTarget& target, const JournalSurvey& survey) {
  Replayer replayer(&target, &survey);
  for (const JournalFile& file : survey.files) {
    if (replayer.done()) break;
    ASSIGN_OR_RETURN(RecordReader reader, RecordReader::Open(target.fs, file.path, file.number));
    while (!replayer.done()) {
      const auto record = reader.Next();
      if (absl::IsOutOfRange(record.status())) break;
      RETURN_IF_ERROR(record.status());
      const absl::Status taken = replayer.Take(*record, &reader);
      if (absl::IsOutOfRange(taken)) break;  // it was torn, and the survey has not counted it
      RETURN_IF_ERROR(taken);
    }
  }
  if (replayer.last()) return *std::move(replayer.last());
  return absl::DataLossError(absl::StrCat("the journal does not lead to step ", survey.step, " any more"));
}

}  // namespace ballast
