#include "server/storage/journal.h"

#include <algorithm>
#include <random>
#include <utility>

#include "server/base/log.h"
#include "server/storage/journal_files.h"

namespace ballast {
namespace {

uint64_t NewIdentity() {
  std::random_device random;
  uint64_t id = 0;
  while (id == 0) id = uint64_t{random()} << 32 | random();
  return id;
}

absl::Span<const std::byte> TextBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace

Journal::Journal(Environment environment)
    : environment_(std::move(environment)),
      writer_(std::make_unique<JournalWriter>(JournalWriter::Options{
          .fs = environment_.fs,
          .folder = environment_.folder,
          .on_synced = [this](uint64_t serial) { Post([this, serial] { OnSynced(serial); }); },
          .on_sync_took = environment_.on_sync_took,
          .on_room = [this] { Post([this] { Pump(); }); },
          .on_failed = [this](absl::Status why) { Post([this, why = std::move(why)] { OnFailed(why); }); }})) {}

void Journal::Post(absl::AnyInvocable<void()> task) const {
  environment_.strand->Post([alive = std::weak_ptr<const bool>(alive_), task = std::move(task)]() mutable {
    if (!alive.expired()) task();
  });
}

// --- what is written ------------------------------------------------------------------------------------------------

void Journal::LogUpdate(const JournaledUpdate& update, absl::Span<const std::byte> gradient,
                        absl::AnyInvocable<void()> then) {
  if (state_ == State::kOff) return then();
  Add({.text = HeadText(JournalRecord{update, gradient.size()}), .bytes = gradient, .then = std::move(then)});
}

void Journal::LogClosed(uint64_t step, uint64_t run_bytes, const std::string& body, bool averaged) {
  if (state_ == State::kOff) return;
  logged_ = step;
  Add({.text = HeadText(JournalRecord{JournaledEnd{step, run_bytes, averaged}, body.size()}) + body});
  CommitIfIdle();
}

void Journal::BeginSegment(uint64_t id, uint64_t continues, uint64_t after_step) {
  tail_ = id;
  bytes_since_ = 0;
  Add({.begins = SegmentHead{.run_id = environment_.run_id,
                             .spec_sha256 = environment_.spec_sha256,
                             .base = id,
                             .continues = continues,
                             .after_step = after_step,
                             .products = environment_.products}});
}

// One commit is under way at a time: what closes meanwhile shares the next.
void Journal::CommitIfIdle() {
  if (marks_.empty() && logged_ > synced_) Commit();
}

void Journal::Commit() {
  marks_.push_back({++serial_, logged_});
  Add({.commits = serial_});
}

void Journal::Add(Entry entry) {
  bytes_since_ += entry.text.size() + entry.bytes.size();
  environment_.on_logged(entry.text.size() + entry.bytes.size());
  waiting_.push_back(std::move(entry));
  Pump();
}

void Journal::Pump() {
  if (std::exchange(pumping_, true)) return;
  while (!waiting_.empty() && HandOver(&waiting_.front())) {
    absl::AnyInvocable<void()> then = std::move(waiting_.front().then);
    waiting_.pop_front();
    if (then) then();
  }
  pumping_ = false;
}

bool Journal::HandOver(Entry* entry) {
  if (entry->begins) writer_->BeginSegment(*entry->begins);
  if (entry->commits != 0) writer_->Commit(entry->commits);
  const size_t text = entry->text.size();
  if (entry->taken < text) entry->taken += writer_->Append(TextBytes(entry->text).subspan(entry->taken));
  if (entry->taken >= text) entry->taken += writer_->Append(entry->bytes.subspan(entry->taken - text));
  return entry->taken == text + entry->bytes.size();
}

// --- what happens beside it -----------------------------------------------------------------------------------------

void Journal::OnCheckpointBegun(uint64_t step) {
  begun_ = {NewIdentity(), step};
  alone_ = state_ != State::kOn;
  BeginSegment(begun_.id, alone_ ? 0 : tail_, step);
  if (state_ == State::kOn) return;
  state_ = State::kBasing;
  logged_ = synced_ = step;
}

void Journal::OnCheckpointOver(bool published) {
  if (!published) {
    if (state_ == State::kBasing) Fall();
    if (alone_) writer_->Remove(begun_.id);  // without that checkpoint it leads nowhere
    return;
  }
  writer_->RemoveBefore(begun_.id);
  if (state_ == State::kOff) return;
  state_ = State::kOn;
  fallen_ = false;
  published_ = begun_;
  durable_ = std::max({durable_, begun_.step, synced_});
}

void Journal::OnRewound(uint64_t to_step, uint64_t generation, bool jumps) {
  // Without the checkpoint that it all goes on from, or with a state from elsewhere, no file leads to what there is.
  if (state_ != State::kOn || jumps || to_step < published_.step) return Forget();
  Add({.text = HeadText(JournalRecord{JournaledRewind{to_step, generation}})});
  for (Mark& mark : marks_) mark.step = std::min(mark.step, to_step);
  logged_ = std::min(logged_, to_step);
  synced_ = std::min(synced_, to_step);
  durable_ = std::min(durable_, to_step);
  Commit();
  rewound_ = serial_;
}

// What is on the disk would bring back what is undone.
void Journal::Forget() {
  TurnOff();
  durable_ = 0;
  rewound_ = 0;
  ++removing_;
  writer_->RemoveAll([this](absl::Status status) {
    Post([this, status = std::move(status)] {
      if (!status.ok()) {
        Log(LogLevel::kError, "journal",
            "files of steps that were undone could not be removed: a restart may bring them back",
            {{"run_id", environment_.run_id}, {"err", std::string(status.message())}});
      }
      removed_ = status;
      --removing_;
      AnswerRewound();
    });
  });
}

void Journal::OnReplaced() { rewound_ == 0 ? TurnOff() : Forget(); }

void Journal::WhenRewound(absl::AnyInvocable<void(absl::Status)> done) {
  when_rewound_.push_back(std::move(done));
  AnswerRewound();
}

void Journal::AnswerRewound() {
  if (rewound_ != 0 || removing_ > 0) return;
  for (auto& done : std::exchange(when_rewound_, {})) done(removed_);
}

void Journal::GoOnFrom(uint64_t step, const Place& place) {
  published_ = {place.base, place.base_step};
  logged_ = synced_ = durable_ = step;
  state_ = State::kOn;
  // A file of its own: what a crash has left of the last one's end is not written over.
  BeginSegment(NewIdentity(), place.tail, step);
}

void Journal::End() {
  state_ = State::kOff;
  waiting_.clear();
  for (auto& done : std::exchange(when_rewound_, {})) done(removed_);
}

// --- what comes of it -----------------------------------------------------------------------------------------------

void Journal::OnSynced(uint64_t serial) {
  if (rewound_ != 0 && rewound_ <= serial) {
    rewound_ = 0;
    AnswerRewound();
  }
  while (!marks_.empty() && marks_.front().serial <= serial) {
    synced_ = marks_.front().step;
    marks_.pop_front();
  }
  if (state_ == State::kOn) durable_ = std::max(durable_, synced_);
  if (state_ != State::kOff) CommitIfIdle();
  environment_.on_moved();
}

void Journal::OnFailed(const absl::Status& why) {
  const bool lost_rewind = rewound_ != 0;
  if (state_ != State::kOff) {
    Fall();
    environment_.on_failed(why);
  }
  if (lost_rewind) Forget();
  environment_.on_moved();
}

void Journal::Fall() {
  TurnOff();
  fallen_ = true;
}

// Who waits for room is let go: nothing of it will be written.
void Journal::TurnOff() {
  state_ = State::kOff;
  marks_.clear();
  for (Entry& entry : std::exchange(waiting_, std::deque<Entry>())) {
    if (entry.then) Post(std::move(entry.then));  // not within the call: whoever turns it off is not done yet
  }
}

bool Journal::MayTell(uint64_t step) const {
  return !environment_.tells_late || state_ == State::kOff || fallen_ || step <= durable_;
}

bool Journal::Behind(uint64_t closed) const {
  return state_ != State::kOff && !fallen_ && closed >= durable_ + environment_.most_steps;
}

bool Journal::WantsCheckpoint() const {
  return state_ == State::kOff ? !fallen_ : bytes_since_ > environment_.most_bytes;
}

}  // namespace ballast
