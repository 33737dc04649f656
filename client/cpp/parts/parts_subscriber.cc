#include "client/cpp/parts/parts_subscriber.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "client/cpp/follow/daemon_subscriber.h"
#include "client/cpp/follow/incoming_version.h"
#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/merge.h"
#include "client/cpp/parts/part_tags.h"
#include "client/cpp/parts/server_list.h"

namespace ballast {
absl::StatusOr<std::unique_ptr<Subscriber>> PartsSubscriber::Open(ClientOptions options,
                                                                  const SubscribeOptions& subscription) {
  auto servers = SplitServers(options.server);
  if (!servers.ok()) return servers.status();
  const auto changes = std::make_shared<ChangeSignal>();
  SubscribeOptions of_parts = subscription;
  of_parts.tag.clear();
  auto opened = AllOrError(ForAll(static_cast<uint32_t>(servers->size()),
                                  [&](uint32_t part) {
                                    ClientOptions own = options;
                                    own.server = (*servers)[part];
                                    return DaemonSubscriber::OpenHeld(std::move(own), of_parts, changes);
                                  }),
                           *servers);
  if (!opened.ok()) return opened.status();
  std::vector<std::unique_ptr<HeldSubscriber>> parts;
  for (auto& part : *opened) parts.push_back(std::move(part));
  auto made = Of(std::move(parts), *std::move(servers), subscription.every, changes);
  if (!made.ok() || subscription.tag.empty()) return made;
  if (auto s = (*made)->Rollback(subscription.tag); !s.ok()) return s;
  return made;
}

absl::StatusOr<std::unique_ptr<PartsSubscriber>> PartsSubscriber::Of(std::vector<std::unique_ptr<HeldSubscriber>> parts,
                                                                     std::vector<std::string> names, uint64_t every,
                                                                     std::shared_ptr<ChangeSignal> changes,
                                                                     absl::Duration patience) {
  std::unique_ptr<PartsSubscriber> made(
      new PartsSubscriber(std::move(parts), std::move(names), every, std::move(changes), patience));
  if (auto s = made->LearnSpec(); !s.ok()) return s;
  return made;
}

PartsSubscriber::PartsSubscriber(std::vector<std::unique_ptr<HeldSubscriber>> parts, std::vector<std::string> names,
                                 uint64_t every, std::shared_ptr<ChangeSignal> changes, absl::Duration patience)
    : parts_(std::move(parts)),
      names_(std::move(names)),
      changes_(std::move(changes)),
      came_(parts_.size()),
      negotiation_(parts_.size(), every),
      patience_(patience, absl::Now()),
      thread_([this] { Watch(); }) {}

PartsSubscriber::~PartsSubscriber() {
  Close();
  thread_.join();
}

void PartsSubscriber::Close() {
  closed_ = true;
  for (const auto& part : parts_) part->Close();
  changes_->Notify();
}

absl::StatusOr<PartsSubscriber::Ids> PartsSubscriber::AskFor(const std::string& tag) const {
  const auto lists = AllOrError(
      ForAll(static_cast<uint32_t>(parts_.size()), [&](uint32_t p) { return parts_[p]->VersionsFor(tag); }), names_);
  if (!lists.ok()) return lists.status();
  return FindTag(*lists, names_, tag);
}

absl::Status PartsSubscriber::Rollback(const std::string& tag) {
  auto ids = AskFor(tag);
  if (!ids.ok()) return ids.status();
  {
    absl::MutexLock turning(&turning_);
    absl::MutexLock lock(&mu_);
    agreed_ = *std::move(ids);
    tagged_ = tag;
    resumed_ = false;
    for (const auto& part : parts_) part->SeekTag(tag);
  }
  changes_->Notify();
  return absl::OkStatus();
}

void PartsSubscriber::Resume() {
  {
    absl::MutexLock lock(&mu_);
    if (!tagged_) return;
    tagged_.reset();
    agreed_.reset();
    resumed_ = true;
  }
  changes_->Notify();
}

PartsSubscriber::Standings PartsSubscriber::Look() const {
  Standings standings;
  for (const auto& part : parts_) standings.push_back(part->standing());
  return standings;
}

std::optional<PartsSubscriber::Ids> PartsSubscriber::agreed() const {
  absl::MutexLock lock(&mu_);
  return agreed_;
}

std::optional<PartsSubscriber::Ids> PartsSubscriber::handed() const {
  absl::MutexLock lock(&mu_);
  return handed_;
}

// --- the caller's thread ---------------------------------------------------------------------------------------------

absl::Status PartsSubscriber::LearnSpec() {
  std::vector<v1::RunSpec> specs;
  for (const auto& part : parts_) specs.push_back(part->spec());
  auto placement = PartPlacement::OfParts(specs);
  if (!placement.ok()) return placement.status();
  placement_ = *std::move(placement);
  spec_ = placement_.WholeOf(specs);
  return absl::OkStatus();
}

absl::StatusOr<std::optional<FollowedVersion>> PartsSubscriber::Next(double timeout_s) {
  const absl::Time deadline = absl::Now() + absl::Seconds(timeout_s);
  for (;;) {
    const uint64_t seen = changes_->count();
    if (closed_) return absl::CancelledError("the subscriber is closed");
    if (auto s = CollectAll(); !s.ok()) return s;
    if (IsHere() && Fits()) {
      if (auto version = HandOut()) return version;
    }
    if (HasSomething()) continue;
    if (!changes_->AwaitMore(seen, deadline)) return std::optional<FollowedVersion>();
  }
}

bool PartsSubscriber::Await(double timeout_s) {
  const absl::Time deadline = absl::Now() + absl::Seconds(timeout_s);
  for (;;) {
    const uint64_t seen = changes_->count();
    if (closed_ || HasSomething() || IsHere()) return true;
    if (!changes_->AwaitMore(seen, deadline)) return false;
  }
}

bool PartsSubscriber::HasSomething() const {
  const std::optional<Ids> common = agreed();
  const Standings standings = Look();
  for (size_t p = 0; p < parts_.size(); ++p) {
    const HeldSubscriber::Standing& part = standings[p];
    if (part.told || (part.waits && !part.offered)) return true;
    if (part.offered && common && IsSameVersion(*part.offered, (*common)[p])) return true;
  }
  return false;
}

absl::Status PartsSubscriber::CollectAll() {
  const std::optional<Ids> common = agreed();
  const Standings standings = Look();
  for (size_t p = 0; p < parts_.size(); ++p) {
    const HeldSubscriber::Standing& part = standings[p];
    const bool agrees = part.offered && common && IsSameVersion(*part.offered, (*common)[p]);
    if (!part.told && !agrees && !(part.waits && !part.offered)) continue;
    if (auto s = Collect(p); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status PartsSubscriber::Collect(size_t p) {
  auto version = parts_[p]->Next(0);
  if (!version.ok()) return NamedBy(names_[p], version.status());
  if (!*version) return absl::OkStatus();
  Came& came = came_[p];
  misfit_ = false;
  const bool respecified = came.any && came.last.respecified;
  came.last = **std::move(version);
  came.last.respecified = came.last.respecified || respecified;
  came.whole = came.whole || !came.last.base_step;
  came.received_bytes += came.last.received_bytes;
  came.changed_elements += came.last.changed_elements;
  came.skipped += came.last.skipped;
  came.any = true;
  return absl::OkStatus();
}

bool PartsSubscriber::IsHere() const {
  const std::optional<Ids> common = agreed();
  if (!common || misfit_) return false;
  const Standings standings = Look();
  for (size_t p = 0; p < parts_.size(); ++p) {
    const HeldSubscriber::Standing& part = standings[p];
    if (part.told || !part.here || !IsSameVersion(*part.here, (*common)[p])) return false;
  }
  return true;
}

// An amended run's daemons are told one after another: until all are, their parts do not fit.
bool PartsSubscriber::Fits() {
  const bool respecified =
      std::any_of(came_.begin(), came_.end(), [](const Came& came) { return came.any && came.last.respecified; });
  misfit_ = respecified && !LearnSpec().ok();
  return !misfit_;
}

std::optional<PartsSubscriber::Ids> PartsSubscriber::TakeAgreed(std::string* tag) {
  const Standings standings = Look();  // what is here changes in Next alone
  absl::MutexLock lock(&mu_);
  if (!agreed_) return std::nullopt;
  for (size_t p = 0; p < parts_.size(); ++p) {
    if (!standings[p].here || !IsSameVersion(*standings[p].here, (*agreed_)[p])) return std::nullopt;
  }
  handed_ = std::exchange(agreed_, std::nullopt);
  *tag = tagged_.value_or("");
  return handed_;
}

std::optional<FollowedVersion> PartsSubscriber::HandOut() {
  FollowedVersion whole;
  bool changes_alone = handed().has_value();
  const std::optional<Ids> ids = TakeAgreed(&whole.tag);
  if (!ids) return std::nullopt;
  std::vector<uint64_t> generations;
  for (const v1::VersionId& id : *ids) generations.push_back(id.generation());
  whole.step = ids->front().step();
  whole.generation = MergeGenerations(generations);
  for (uint32_t p = 0; p < parts_.size(); ++p) {
    Came& came = came_[p];
    whole.elements += came.last.elements;
    whole.whole_bytes += came.last.whole_bytes;
    whole.closed_unix_s = std::max(whole.closed_unix_s, came.last.closed_unix_s);
    if (!std::exchange(came.any, false)) continue;
    for (const uint32_t tensor : came.last.changed) whole.changed.push_back(placement_.numbers(p)[tensor]);
    whole.changed_elements += std::min(std::exchange(came.changed_elements, 0), came.last.elements);
    whole.received_bytes += std::exchange(came.received_bytes, 0);
    whole.skipped = std::max(whole.skipped, std::exchange(came.skipped, 0));
    changes_alone = !std::exchange(came.whole, false) && changes_alone;
    whole.respecified = std::exchange(came.last.respecified, false) || whole.respecified;
    parts_[p]->EndVersion();
  }
  std::sort(whole.changed.begin(), whole.changed.end());
  if (changes_alone && !whole.respecified) whole.base_step = last_step_;
  last_step_ = whole.step;
  changes_->Notify();
  return whole;
}

bool PartsSubscriber::readable() const {
  const std::optional<Ids> last = handed();
  if (!last) return false;
  for (size_t p = 0; p < parts_.size(); ++p) {
    const auto here = parts_[p]->standing().here;
    if (!here || !IsSameVersion(*here, (*last)[p])) return false;
  }
  return true;
}

absl::Status PartsSubscriber::CheckReadable() const {
  if (readable()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("no version of run '", spec_.run_id(),
                   "' is here: none has come yet, or one comes whole just now; wait in Next until it returns one"));
}

absl::StatusOr<PartPlacement::Place> PartsSubscriber::Find(uint32_t tensor) const {
  if (auto s = CheckReadable(); !s.ok()) return s;
  if (tensor < placement_.tensors()) return placement_[tensor];
  return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor, ", but the run has ", placement_.tensors()));
}

absl::StatusOr<FollowedTensor> PartsSubscriber::Served(uint32_t tensor) const {
  const auto place = Find(tensor);
  if (!place.ok()) return place.status();
  return parts_[place->part]->Served(place->index);
}

absl::Status PartsSubscriber::Read(uint32_t tensor, absl::Span<std::byte> out) const {
  const auto place = Find(tensor);
  return place.ok() ? parts_[place->part]->Read(place->index, out) : place.status();
}

absl::StatusOr<uint64_t> PartsSubscriber::CountChanged(uint32_t tensor) const {
  const auto place = Find(tensor);
  if (!place.ok()) return place.status();
  return parts_[place->part]->CountChanged(place->index);
}

absl::Status PartsSubscriber::ReadChanged(uint32_t tensor, absl::Span<int64_t> places,
                                          absl::Span<std::byte> values) const {
  const auto place = Find(tensor);
  return place.ok() ? parts_[place->part]->ReadChanged(place->index, places, values) : place.status();
}

}  // namespace ballast
