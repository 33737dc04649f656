// A run that is read back goes on from its journal, too.
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/log.h"
#include "server/run/journal_replay.h"
#include "server/run/run_registry.h"
#include "server/storage/journal_files.h"

namespace ballast {

absl::Status RunRegistry::ReplayJournalOf(const CheckpointReader& checkpoint, uint64_t base, Run* run) {
  if (!HasJournal(run->spec())) return absl::OkStatus();
  const std::string& of_checkpoint = checkpoint.folder();
  const std::string folder = absl::StrCat(of_checkpoint.substr(0, of_checkpoint.rfind('/')), "/", kJournalFolder);
  const uint64_t step = checkpoint.manifest().step();
  auto chain = JournalChain(options_.storage->fs(), folder, base);
  auto survey = chain.ok() ? SurveyJournal(options_.storage->fs(), *std::move(chain), step, run->products(), Progress())
                           : absl::StatusOr<JournalSurvey>(chain.status());
  absl::Status status = survey.status();
  if (status.ok()) status = run->Replay(*survey, base, step, Progress());
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("run '", run->spec().run_id, "' is on the disk with its checkpoint of step ", step,
                                     ", and the journal of the steps since cannot be read: ", status.message(),
                                     ". Bring the file back, "
                                     "or give those steps up: move ",
                                     folder, " away, and start the daemon again"));
  }
  if (survey->files.empty()) return status;
  Log(LogLevel::kInfo, "restored", "the run's journal has been replayed over the checkpoint",
      {{"run_id", run->spec().run_id}, {"step", survey->step}, {"steps", survey->steps}});
  return absl::OkStatus();
}

}  // namespace ballast
