// What a run's journal has beyond a checkpoint: first a survey, which reads all of it and changes nothing, then the
// updates of the steps that stand, in turn.
//
//   ASSIGN_OR_RETURN(JournalSurvey survey, SurveyJournal(fs, chain, 120));
//   ASSIGN_OR_RETURN(CheckpointedRun run, ReplayJournal({...}, survey));     // it is as after survey.step
//
// FAILED_PRECONDITION: there are steps to make again, of another edition of the numerics; it says what to do.
// A record that a crash tore ends the journal. DATA_LOSS names the file: damage in the middle, or records that are not of
// this run; nothing is to be made of the run then. Off the strand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "server/run/checkpointed_run.h"
#include "server/spec/run_spec.h"
#include "server/storage/fs.h"
#include "server/storage/journal_files.h"

namespace ballast {

struct JournalSurvey {
  std::vector<JournalFile> files;  // in turn
  // By stretch of records up to a step's end or a rewind, in turn: whether its updates stand.
  std::vector<bool> stands;
  uint64_t steps = 0;       // that stand
  uint64_t step = 0;        // the last of them; the checkpoint's, where there is none
  uint64_t generation = 0;  // the highest that a rewind began; 0: there was none
  uint64_t tail() const { return files.empty() ? 0 : files.back().head.base; }
};
// chain: of JournalChain; base_step: the checkpoint's; products: Run::products, of the run that goes on; progress: called at
// each record.
absl::StatusOr<JournalSurvey> SurveyJournal(
    Fs* fs, std::vector<JournalFile> chain, uint64_t base_step, absl::string_view products = "",
    const std::function<void()>& progress = [] {});

struct JournalTarget {
  Fs* fs;
  const RunSpec* spec;
  const CheckpointCodec* codec;
  // Room for the tensor's gradient.
  std::function<absl::Span<std::byte>(uint32_t tensor)> room;
  // Updates the tensor by the gradient that is in its room, and returns when that is done.
  std::function<void(const JournaledUpdate& update)> update;
  // Moves the averages of the tensors that the step has not updated.
  std::function<void(uint64_t step)> average = {};
};
// What the run knows after the survey's last step, of which there is one.
absl::StatusOr<CheckpointedRun> ReplayJournal(const JournalTarget& target, const JournalSurvey& survey);

}  // namespace ballast
