#include "server/follow/tag_keeper.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/retry_after.h"

#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"

namespace ballast {
namespace {

constexpr double kAskAgainS = 1;
constexpr size_t kMostDescribed = 20;

// Whether that is what the order asks for, of the version of this id.
bool Is(const VersionTag& tag, const TagKeeper::Order& order, const VersionId& id) {
  return tag.id == id && tag.mark == order.mark && tag.unreadable.empty();
}

absl::Status Cancelled() { return absl::CancelledError("the version is not wanted on the disk any more"); }

}  // namespace

void StoredVersion::Read(uint32_t tensor, uint64_t chunk, Done done) {
  disk_->Post([self = shared_from_this(), tensor, chunk, done = std::move(done)]() mutable {
    auto piece = self->file_->Read(tensor, chunk);
    self->strand_->Post([done = std::move(done), piece = std::move(piece)]() mutable { done(std::move(piece)); });
  });
}

TagKeeper::TagKeeper(Environment environment) : environment_(std::move(environment)) {
  if (on_disk()) disk_ = std::make_unique<Strand>(Strand::Options{.name = "tags"});
}

std::string TagKeeper::folder() const { return absl::StrCat(environment_.storage.run_folder, "/", kTagsFolder); }

void TagKeeper::Load() {
  if (!on_disk()) return;
  const auto files = ListTagFiles(environment_.storage.fs, folder());
  load_status_ = files.status();
  if (!files.ok()) {
    return Log(LogLevel::kWarn, "tags", "the run's versions with names cannot be listed",
               {{"run_id", environment_.spec->run_id}, {"err", std::string(files.status().message())}});
  }
  for (const TagFile& file : *files) {
    Entry entry{.tag = {.name = file.tag, .file = absl::StrCat(folder(), "/", NameOf(file))}, .number = file.number};
    const auto opened = VersionFile::Open(environment_.storage.fs, entry.tag.file, environment_.spec);
    last_number_ = std::max(last_number_, file.number);
    if (opened.ok()) {
      const VersionFileInfo& info = (*opened)->info();
      entry.tag.id = info.id;
      entry.tag.mark = info.mark;
      entry.tag.bytes = (*opened)->bytes();
      entry.tag.closed_unix_s = info.closed_unix_s;
      entry.tag.tagged_unix_s = info.tagged_unix_s;
    } else {
      entry.tag.unreadable = std::string(opened.status().message());
      Log(LogLevel::kWarn, "tags", "a version with a name cannot be read",
          {{"run_id", environment_.spec->run_id}, {"tag", file.tag}, {"err", entry.tag.unreadable}});
    }
    entries_[file.tag] = std::move(entry);
  }
  environment_.changed();
}

uint64_t TagKeeper::bytes() const {
  uint64_t sum = 0;
  for (const auto& [name, entry] : entries_) sum += entry.tag.bytes;
  return sum;
}

std::string TagKeeper::Describe() const {
  std::vector<std::string> described;
  for (const auto& [name, entry] : entries_) {
    if (described.size() == kMostDescribed) {
      described.push_back(absl::StrCat("and ", entries_.size() - kMostDescribed, " more"));
      break;
    }
    described.push_back(entry.tag.unreadable.empty() ? absl::StrCat("'", name, "' (step ", entry.tag.id.step, ")")
                                                     : absl::StrCat("'", name, "' (unreadable)"));
  }
  return described.empty() ? "none" : absl::StrJoin(described, ", ");
}

absl::Status TagKeeper::CheckName(const std::string& name) const {
  RETURN_IF_ERROR(load_status_);
  if (entries_.contains(name)) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("run '", environment_.spec->run_id, "' has no version of the name '", name,
                                          "'; names: ", Describe()));
}

const VersionTag* TagKeeper::Given(const Order& order) const {
  const auto found = entries_.find(order.name);
  const bool given = found != entries_.end() && order.only && Is(found->second.tag, order, *order.only);
  return given ? &found->second.tag : nullptr;
}

absl::Status TagKeeper::Check(const Order& order, const std::optional<VersionId>& id) const {
  RETURN_IF_ERROR(load_status_);
  if (id && order.only && *id != *order.only) {
    return absl::AbortedError(absl::StrCat("run '", environment_.spec->run_id, "' has gone on: its version is of step ",
                                           id->step, ", generation ", id->generation,
                                           ", and the one to name is of step ", order.only->step, ", generation ",
                                           order.only->generation, "; ask again"));
  }
  const std::string& run = environment_.spec->run_id;
  const uint32_t most = environment_.spec->follow->tags;
  if (most == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("run '", run,
                     "' keeps no versions by name: its spec has no follow.tags; create it with some, or "
                     "amend it"));
  }
  const auto found = entries_.find(order.name);
  if (found == entries_.end()) {
    if (entries_.size() < most) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat("run '", run, "' has ", entries_.size(), " versions with names, ",
                                                     "and its spec allows ", most, " (follow.tags): untag one of ",
                                                     Describe(), ", or allow more by AmendRun"));
  }
  const VersionTag& tag = found->second.tag;
  if (!id || order.replace || Is(tag, order, *id)) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat("'", order.name, "' is the name of another version of run '", run,
                                               "', of step ", tag.id.step,
                                               "; with replace it is given to this one, of ", "step ", id->step));
}

const TagKeeper::Entry* TagKeeper::Find(const VersionChoice& choice) const {
  if (!choice.tag.empty()) {
    const auto found = entries_.find(choice.tag);
    return found == entries_.end() ? nullptr : &found->second;
  }
  const Entry* newest = nullptr;
  for (const auto& [name, entry] : entries_) {
    if (!choice.Is(entry.tag.id) || !entry.tag.unreadable.empty()) continue;
    if (newest == nullptr || newest->tag.id.generation < entry.tag.id.generation) newest = &entry;
  }
  return newest;
}

void TagKeeper::Insert(Entry entry) {
  entries_[entry.tag.name] = std::move(entry);
  environment_.changed();
}

void TagKeeper::Add(Order order, std::shared_ptr<const WeightVersion> version, Done done) {
  if (auto s = Check(order, version->id); !s.ok()) return done(s);
  const auto found = entries_.find(order.name);
  if (found != entries_.end() && Is(found->second.tag, order, version->id)) {
    return done(Tagged{.tag = found->second.tag, .created = false});
  }
  VersionFileInfo info{.run_id = environment_.spec->run_id,
                       .tag = order.name,
                       .mark = order.mark,
                       .id = version->id,
                       .closed_unix_s = version->closed_unix_s,
                       .tagged_unix_s = UnixSeconds(),
                       .digests = version->digests};
  if (on_disk()) {
    return Write({.version = std::move(version), .info = std::move(info)}, std::move(order), std::move(done));
  }
  const VersionTag tag{.name = order.name,
                       .id = info.id,
                       .bytes = version->bytes,
                       .closed_unix_s = info.closed_unix_s,
                       .tagged_unix_s = info.tagged_unix_s,
                       .mark = order.mark};
  Insert({.tag = tag, .version = std::move(version)});
  done(Tagged{.tag = tag, .created = true});
}

void TagKeeper::AddAgain(Order order, const Entry& from, Done done) {
  if (from.version != nullptr) return Add(std::move(order), from.version, std::move(done));
  if (auto s = Check(order, from.tag.id); !s.ok()) return done(s);
  const auto found = entries_.find(order.name);
  if (found != entries_.end() && Is(found->second.tag, order, from.tag.id)) {
    return done(Tagged{.tag = found->second.tag, .created = false});
  }
  if (!from.tag.unreadable.empty()) return done(absl::FailedPreconditionError(from.tag.unreadable));
  VersionFileInfo info{.run_id = environment_.spec->run_id,
                       .tag = order.name,
                       .mark = order.mark,
                       .id = from.tag.id,
                       .closed_unix_s = from.tag.closed_unix_s,
                       .tagged_unix_s = UnixSeconds()};
  Write({.from = from.tag.file, .info = std::move(info)}, std::move(order), std::move(done));
}

void TagKeeper::Write(Writing writing, Order order, Done done) {
  if (busy_ != nullptr) {
    return done(WithRetryAfter(absl::UnavailableError(absl::StrCat("another name of run '", environment_.spec->run_id,
                                                                   "' is being written or removed; ask again")),
                               kAskAgainS));
  }
  writing.storage = environment_.storage;
  writing.spec = environment_.spec;
  writing.chunk_starts = environment_.chunk_starts;
  writing.memory = environment_.memory;
  writing.version_bytes = environment_.version_bytes;
  writing.file = {.tag = order.name, .number = ++last_number_};
  if (const auto found = entries_.find(order.name); found != entries_.end()) writing.replaces = found->second.tag.file;
  cancelled_ = std::make_shared<std::atomic<bool>>(false);
  writing.cancelled = cancelled_;
  const auto shared = std::make_shared<Done>(std::move(done));
  busy_ = [shared](absl::Status why) { (*shared)(std::move(why)); };
  disk_->Post([self = weak_from_this(), call = ++calls_, strand = environment_.strand, shared,
               writing = std::move(writing)]() mutable {
    auto written = WriteNow(&writing);
    const uint64_t number = writing.file.number;
    writing = {};  // nothing of the version is held here when the strand goes on
    strand->Post([self, call, shared, number, written = std::move(written)]() mutable {
      const auto keeper = self.lock();
      if (keeper == nullptr || keeper->busy_ == nullptr || keeper->calls_ != call) return;  // it was answered
      keeper->busy_ = nullptr;
      if (!written.ok()) return (*shared)(written.status());
      keeper->Insert({.tag = *written, .number = number});
      (*shared)(Tagged{.tag = *written, .created = true});
    });
  });
}

absl::StatusOr<std::shared_ptr<const WeightVersion>> TagKeeper::ReadWhole(const Writing& writing) {
  ASSIGN_OR_RETURN(const auto file, VersionFile::Open(writing.storage.fs, writing.from, writing.spec));
  auto version = std::make_shared<WeightVersion>();
  version->id = file->info().id;
  version->digests = file->info().digests;
  const std::vector<uint64_t>& starts = *writing.chunk_starts;
  for (uint32_t i = 0; i < writing.spec->tensors.size(); ++i) {
    for (uint64_t c = starts[i]; c < starts[i + 1]; ++c) {
      if (*writing.cancelled) return Cancelled();
      ASSIGN_OR_RETURN(VersionPiecePtr piece, file->Read(i, c - starts[i]));
      version->pieces.push_back(std::move(piece));
    }
  }
  return version;
}

absl::Status TagKeeper::WriteFileOf(const Writing& writing, const std::string& folder) {
  const std::vector<absl::Span<const std::byte>> data =
      VersionData(*writing.spec, *writing.chunk_starts, *writing.version);
  VersionFileInfo info = writing.info;
  info.sums = DataSums(data);
  const std::string header = VersionHeader(*writing.spec, info);
  TagFile part = writing.file;
  part.whole = false;
  FileContent content{.name = NameOf(part),
                      .pieces = {{reinterpret_cast<const std::byte*>(header.data()), header.size()}}};
  content.pieces.insert(content.pieces.end(), data.begin(), data.end());
  const auto leave = [&](uint64_t bytes) {
    return !*writing.cancelled && writing.storage.rate->Take(bytes) ? absl::OkStatus() : Cancelled();
  };
  const auto write = [&](size_t, const DiskBuffer& buffer) {
    return ballast::WriteFile(writing.storage.fs, folder, content, buffer, leave).status();
  };
  RETURN_IF_ERROR(writing.storage.threads->ForEach(1, write));
  Fs* const fs = writing.storage.fs;
  RETURN_IF_ERROR(fs->Rename(absl::StrCat(folder, "/", NameOf(part)), absl::StrCat(folder, "/", NameOf(writing.file))));
  return fs->SyncFolder(folder);
}

absl::StatusOr<VersionTag> TagKeeper::WriteNow(Writing* writing) {
  FollowMemory::Share share;
  if (writing->version == nullptr) {
    share = FollowMemory::Share(writing->memory, writing->version_bytes);
    ASSIGN_OR_RETURN(writing->version, ReadWhole(*writing));
    writing->info.digests = writing->version->digests;
  }
  Fs* const fs = writing->storage.fs;
  const std::string& run_folder = writing->storage.run_folder;
  const std::string folder = absl::StrCat(run_folder, "/", kTagsFolder);
  const absl::Status made = fs->MakeFolder(folder);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  RETURN_IF_ERROR(fs->SyncFolder(run_folder));
  const absl::Status status = WriteFileOf(*writing, folder);
  if (!status.ok()) {
    // Of what was renamed and not synced nobody knows whether it counts after a power cut.
    TagFile part = writing->file;
    part.whole = false;
    for (const TagFile& left : {part, writing->file}) {
      const absl::Status removed = fs->RemoveFile(absl::StrCat(folder, "/", NameOf(left)));
      if (removed.ok() || absl::IsNotFound(removed)) continue;
      Log(LogLevel::kWarn, "tags", "what was begun of a version with a name is left", {{"err", removed.ToString()}});
    }
    return absl::Status(status.code(), absl::StrCat("the version of step ", writing->info.id.step, " is not kept as '",
                                                    writing->info.tag, "': ", status.message()));
  }
  if (!writing->replaces.empty()) {
    // The newer one counts already; the older, if it stays, goes when a daemon starts.
    absl::Status removed = fs->RemoveFile(writing->replaces);
    if (removed.ok()) removed = fs->SyncFolder(folder);
    if (!removed.ok()) {
      Log(LogLevel::kWarn, "tags", "a version whose name was given to another is left", {{"err", removed.ToString()}});
    }
  }
  return VersionTag{.name = writing->info.tag,
                    .id = writing->info.id,
                    .bytes = VersionDataBytes(*writing->spec),
                    .closed_unix_s = writing->info.closed_unix_s,
                    .tagged_unix_s = writing->info.tagged_unix_s,
                    .file = absl::StrCat(folder, "/", NameOf(writing->file)),
                    .mark = writing->info.mark};
}

void TagKeeper::Remove(const std::string& name, absl::AnyInvocable<void(absl::Status)> done) {
  if (auto s = CheckName(name); !s.ok()) return done(s);
  const auto forget = [this, name] {
    entries_.erase(name);
    environment_.changed();
  };
  if (!on_disk()) {
    forget();
    return done(absl::OkStatus());
  }
  if (busy_ != nullptr) {
    return done(WithRetryAfter(absl::UnavailableError("another name of the run is being written or removed; ask again"),
                               kAskAgainS));
  }
  const auto shared = std::make_shared<absl::AnyInvocable<void(absl::Status)>>(std::move(done));
  busy_ = [shared](absl::Status why) { (*shared)(std::move(why)); };
  disk_->Post([self = weak_from_this(), call = ++calls_, strand = environment_.strand, shared, forget,
               fs = environment_.storage.fs, folder = folder(), file = entries_[name].tag.file] {
    const absl::Status removed = fs->RemoveFile(file);
    const bool gone = removed.ok() || absl::IsNotFound(removed);
    const absl::Status status = gone ? fs->SyncFolder(folder) : removed;
    strand->Post([self, call, shared, forget, gone, status] {
      const auto keeper = self.lock();
      if (keeper == nullptr || keeper->busy_ == nullptr || keeper->calls_ != call) return;
      keeper->busy_ = nullptr;
      if (gone) forget();
      (*shared)(status);
    });
  });
}

void TagKeeper::Open(const Entry& entry, std::function<void(absl::StatusOr<std::shared_ptr<StoredVersion>>)> done) {
  if (!entry.tag.unreadable.empty()) return done(absl::FailedPreconditionError(entry.tag.unreadable));
  disk_->Post([self = weak_from_this(), done = std::move(done), fs = environment_.storage.fs, file = entry.tag.file,
               spec = environment_.spec, disk = disk_.get(), strand = environment_.strand] {
    absl::StatusOr<std::unique_ptr<VersionFile>> opened = VersionFile::Open(fs, file, spec);
    std::shared_ptr<StoredVersion> stored;
    if (opened.ok()) stored = std::make_shared<StoredVersion>(*std::move(opened), disk, strand);
    strand->Post([self, done, stored, status = opened.status()] {
      if (self.lock() == nullptr) return;
      stored != nullptr ? done(stored) : done(status);
    });
  });
}

void TagKeeper::End(const absl::Status& why) {
  if (cancelled_ != nullptr) *cancelled_ = true;
  if (busy_ == nullptr) return;
  auto end = std::exchange(busy_, nullptr);
  end(why);
}

}  // namespace ballast
