// A run's journal: each update and each step's end is written before others may rely on the step, so that a crash takes
// none of them. It goes on from a checkpoint; where it cannot be written, the run goes on with its checkpoints alone.
//
//   journal.LogUpdate(update, gradient, [] {...});    // the gradient may be read, and changed, from then on
//   journal.LogClosed(step, body);
//   if (journal.MayTell(step)) ...                    // else on_moved says when to ask again
//
// States. Off: nothing is written; the next checkpoint that is begun begins a file. Basing: what comes after that
// checkpoint is written, and counts once the checkpoint is on the disk. On: it counts when it is synced. A rewind to a
// step before the checkpoint, and weights that are replaced, turn it off, and so does a disk that refuses.
//
// Strand-confined. Callbacks come on the strand; LogUpdate's may come within the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"

#include "server/base/strand.h"
#include "server/storage/fs.h"
#include "server/storage/journal_writer.h"

namespace ballast {

class Journal {
 public:
  struct Environment {
    std::string run_id, spec_sha256;
    std::string products;  // as SegmentHead
    bool tells_late;       // a result waits for its step
    uint64_t most_steps;   // that have closed and are not durable, before another one may begin
    // Both outlive the journal.
    Strand* strand;
    Fs* fs;
    std::string folder;
    uint64_t most_bytes;                                     // since a checkpoint, before another one is wanted
    std::function<void()> on_moved;                          // durable_step is another, or MayTell may be
    std::function<void(const absl::Status& why)> on_failed;  // it is off
    std::function<void(uint64_t bytes)> on_logged;
    std::function<void(double seconds)> on_sync_took = [](double) {};  // comes on a thread of the journal's own
  };
  explicit Journal(Environment environment);

  // --- what is written ---
  // `then`: all of the gradient is taken over, or never will be. Dropped by End.
  void LogUpdate(const JournaledUpdate& update, absl::Span<const std::byte> gradient, absl::AnyInvocable<void()> then);
  // The body: CheckpointCodec::run_bytes, and behind these run_bytes the ranks' client_state. averaged: as in JournaledEnd.
  void LogClosed(uint64_t step, uint64_t run_bytes, const std::string& body, bool averaged = false);

  // --- what happens beside it ---
  // The checkpoint of this step, the last that has closed, is begun: it is to carry the identity `base`.
  void OnCheckpointBegun(uint64_t step);
  uint64_t base() const { return begun_.id; }
  // That checkpoint is on the disk, or will not be.
  void OnCheckpointOver(bool published);
  // The steps since this one are undone. `jumps`: the state comes from elsewhere, and no file leads to it.
  void OnRewound(uint64_t to_step, uint64_t generation, bool jumps);
  // The state is no longer what the last closed step left.
  void OnReplaced();
  // `done` when no crash can bring back what OnRewound was told of.
  void WhenRewound(absl::AnyInvocable<void(absl::Status)> done);
  // A new run's first: it is at this step, to which the files lead from the checkpoint `base`, of base_step, to the
  // last, `tail`.
  struct Place {
    uint64_t base = 0, base_step = 0, tail = 0;
  };
  void GoOnFrom(uint64_t step, const Place& place);
  // Whoever waits will not be called.
  void End();

  // --- what may be relied on ---
  // The last closed step that a crash leaves; 0: the checkpoints' is.
  uint64_t durable_step() const { return durable_; }
  // Whether the step's result may be told.
  bool MayTell(uint64_t step) const;
  // Whether the step after this one must wait, since too many are not durable.
  bool Behind(uint64_t closed) const;
  // Whether a checkpoint is to be begun, so that it can go on from there, or what was written can go.
  bool WantsCheckpoint() const;
  bool on() const { return state_ == State::kOn; }
  bool writes() const { return state_ != State::kOff; }

 private:
  enum class State { kOff, kBasing, kOn };
  struct Base {
    uint64_t id = 0, step = 0;
  };
  // What waits for room, in order; the head, then what it is about.
  struct Entry {
    std::string text = {};
    absl::Span<const std::byte> bytes = {};
    absl::AnyInvocable<void()> then = nullptr;
    size_t taken = 0;      // of both together
    uint64_t commits = 0;  // serial; 0: none
    std::optional<SegmentHead> begins = {};
  };
  struct Mark {
    uint64_t serial = 0, step = 0;
  };

  void Add(Entry entry);
  void Pump();
  // Whether all of it is handed over.
  bool HandOver(Entry* entry);
  void Commit();
  void CommitIfIdle();
  void BeginSegment(uint64_t id, uint64_t continues, uint64_t after_step);
  void OnSynced(uint64_t serial);
  void OnFailed(const absl::Status& why);
  void TurnOff();
  void Fall();    // turns it off until a checkpoint is due by itself
  void Forget();  // turns it off, and removes its files
  void AnswerRewound();
  // On the strand, unless the journal is gone by then.
  void Post(absl::AnyInvocable<void()> task) const;

  const Environment environment_;
  State state_ = State::kOff;
  bool fallen_ = false;  // it is off since the disk refused, until a checkpoint brings it back
  bool pumping_ = false;
  Base begun_ = {};      // the checkpoint begun last
  bool alone_ = false;   // its file goes on from no other
  Base published_ = {};  // that files go on from, on the disk
  uint64_t tail_ = 0;    // identity of the file that is written
  uint64_t logged_ = 0;  // the last closed step that was handed to the queue
  uint64_t synced_ = 0;  // likewise, and is on the disk
  uint64_t durable_ = 0;
  uint64_t serial_ = 0;       // of the last commit
  uint64_t rewound_ = 0;      // of the one that a rewind waits for; 0: none
  uint64_t bytes_since_ = 0;  // the file was begun
  std::deque<Mark> marks_;    // commits under way
  std::deque<Entry> waiting_;
  int removing_ = 0;      // files that a rewind took the meaning of
  absl::Status removed_;  // an error: some of them are left
  std::vector<absl::AnyInvocable<void(absl::Status)>> when_rewound_;
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>();
  std::unique_ptr<JournalWriter> writer_;  // last: its thread calls back
};

}  // namespace ballast
