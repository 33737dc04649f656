#include "tests/server/storage/model_fs.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "server/base/status_macros.h"
#include "tests/split_mix.h"

namespace ballast {

struct ModelFs::Locks {
  absl::Mutex mu;
  std::set<std::string> held ABSL_GUARDED_BY(mu);  // folders
};

namespace {

std::string ModelNameOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string ModelFolderOf(const std::string& path) {
  return path.substr(0, path.find('/') == std::string::npos ? 0 : path.rfind('/'));
}

absl::Status ModelError(const char* what, const std::string& path, const absl::Status& why) {
  return absl::Status(why.code(), absl::StrCat("cannot ", what, " ", path, ": ", why.message()));
}

class ModelLock final : public FolderLock {
 public:
  explicit ModelLock(absl::AnyInvocable<void()> release) : release_(std::move(release)) {}
  ~ModelLock() override { release_(); }
  absl::Status CheckPlace() const override { return absl::OkStatus(); }  // nobody moves a folder that is in use

 private:
  absl::AnyInvocable<void()> release_;
};

}  // namespace

class ModelInputFile final : public InputFile {
 public:
  ModelInputFile(ModelFs* fs, ModelFs::NodePtr node, std::string path, uint64_t bytes)
      : fs_(fs), node_(std::move(node)), path_(std::move(path)), bytes_(bytes) {}
  uint64_t bytes() const override { return bytes_; }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) override { return fs_->Read(node_, path_, offset, to); }

 private:
  ModelFs* const fs_;
  const ModelFs::NodePtr node_;
  const std::string path_;
  const uint64_t bytes_;
};

class ModelOutputFile final : public OutputFile {
 public:
  ModelOutputFile(ModelFs* fs, ModelFs::NodePtr node, std::string path)
      : fs_(fs), node_(std::move(node)), path_(std::move(path)) {}
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> bytes) override {
    return fs_->Store(node_, path_,
                      {.offset = offset, .bytes = {reinterpret_cast<const char*>(bytes.data()), bytes.size()}});
  }
  absl::Status SetSize(uint64_t bytes) override { return fs_->Store(node_, path_, {.size = bytes}); }
  absl::Status Sync() override { return fs_->SyncFile(node_, path_); }

 private:
  ModelFs* const fs_;
  const ModelFs::NodePtr node_;
  const std::string path_;
};

ModelFs::ModelFs()
    : root_(std::make_shared<ModelNode>(ModelNode{.is_folder = true})), locks_(std::make_shared<Locks>()) {}
ModelFs::~ModelFs() = default;

absl::StatusOr<ModelFs::Fate> ModelFs::Count(const std::string& what) {
  ++calls_;
  log_.push_back(what);
  const bool cut = cut_at_ && calls_ >= *cut_at_;
  failed_ = failed_ || cut || failures_.count(calls_) > 0;
  if (cut) return absl::UnavailableError(absl::StrCat(what, ": power cut"));
  if (const auto failure = failures_.find(calls_); failure != failures_.end()) {
    const absl::Status& status = failure->second.status;
    return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
  }
  return skip_at_ == calls_ ? Fate::kSkip : Fate::kDo;
}

absl::Status ModelFs::CountRead(const std::string& what) {
  if (counts_reads_) return Count(what).status();
  if (cut_at_ && calls_ >= *cut_at_) return absl::UnavailableError(absl::StrCat(what, ": power cut"));
  return absl::OkStatus();
}

void ModelFs::AwaitCalls(int calls) const {
  absl::MutexLock lock(&mu_);
  const auto made = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return calls_ >= calls || failed_; };
  mu_.Await(absl::Condition(&made));
}
std::vector<std::string> ModelFs::log() const {
  absl::MutexLock lock(&mu_);
  return log_;
}
void ModelFs::set_counts_reads(bool counts) {
  absl::MutexLock lock(&mu_);
  counts_reads_ = counts;
}
void ModelFs::CutAt(int call) {
  absl::MutexLock lock(&mu_);
  cut_at_ = call;
}
void ModelFs::FailAt(int call, absl::Status status, uint64_t written) {
  absl::MutexLock lock(&mu_);
  failures_[call] = {std::move(status), written};
}
void ModelFs::SkipAt(int call) {
  absl::MutexLock lock(&mu_);
  skip_at_ = call;
}
void ModelFs::set_capacity(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  capacity_ = bytes;
}
void ModelFs::set_sync_keeps_name(bool keeps) {
  absl::MutexLock lock(&mu_);
  sync_keeps_name_ = keeps;
}

absl::StatusOr<ModelFs::NodePtr> ModelFs::Find(absl::string_view path) const {
  NodePtr node = root_;
  std::string at;
  for (const absl::string_view name : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    if (!node->is_folder) return absl::FailedPreconditionError(absl::StrCat(at, " is no folder"));
    absl::StrAppend(&at, "/", name);
    const auto found = node->names.find(name);
    if (found == node->names.end()) return absl::NotFoundError(absl::StrCat(at, " is not there"));
    node = found->second;
  }
  return node;
}

absl::StatusOr<ModelFs::NodePtr> ModelFs::FindFolder(absl::string_view path) const {
  ASSIGN_OR_RETURN(NodePtr node, Find(path));
  if (!node->is_folder) return absl::FailedPreconditionError(absl::StrCat(path, " is no folder"));
  return node;
}

ModelFs::NodePtr ModelFs::FileAt(const std::string& path) const {
  const auto node = Find(path);
  if (!node.ok() || (*node)->is_folder) throw std::invalid_argument(absl::StrCat("there is no file ", path));
  return *node;
}

uint64_t ModelFs::Room() const {
  if (!capacity_) return std::numeric_limits<uint64_t>::max();
  return *capacity_ - std::min(*capacity_, root_->Bytes());
}

absl::Status ModelFs::Store(const NodePtr& node, const std::string& path, ModelChange change) {
  absl::MutexLock lock(&mu_);
  const auto keep = [&](uint64_t bytes) {
    change.bytes.resize(std::min<uint64_t>(bytes, change.bytes.size()));
    if (change.size || !change.bytes.empty()) node->Add(std::move(change));
  };
  const auto fate = Count(absl::StrCat(change.size ? "size " : "write ", path));
  if (!fate.ok()) {
    const auto failure = failures_.find(calls_);
    if (!change.size && failure != failures_.end() && !(cut_at_ && calls_ >= *cut_at_)) keep(failure->second.written);
    return fate.status();
  }
  if (*fate == Fate::kSkip) return absl::OkStatus();
  const uint64_t has = node->content.size(), room = Room();
  const uint64_t end = change.size ? *change.size : change.bytes.empty() ? 0 : change.offset + change.bytes.size();
  if (end > has && end - has > room) {
    if (!change.size && has + room > change.offset) keep(has + room - change.offset);
    return ModelError("write", path, absl::ResourceExhaustedError("the disk is full"));
  }
  keep(change.bytes.size());
  return absl::OkStatus();
}

absl::Status ModelFs::SyncFile(const NodePtr& node, const std::string& path) {
  absl::MutexLock lock(&mu_);
  const auto fate = Count(absl::StrCat("sync ", path));
  if (!fate.ok()) {
    node->SyncFails();
    return fate.status();
  }
  if (*fate == Fate::kSkip) return absl::OkStatus();
  node->Sync();
  if (sync_keeps_name_) root_->KeepNamesTo(node.get());
  return absl::OkStatus();
}

absl::Status ModelFs::Read(const NodePtr& node, const std::string& path, uint64_t offset, absl::Span<std::byte> to) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CountRead(absl::StrCat("read ", path)));
  if (to.empty()) return absl::OkStatus();
  const std::string& content = node->content;
  if (offset > content.size() || to.size() > content.size() - offset) {
    return absl::DataLossError(absl::StrCat(path, " ends at byte ", content.size()));
  }
  std::memcpy(to.data(), content.data() + offset, to.size());
  return absl::OkStatus();
}

absl::StatusOr<ModelFs::NodePtr> ModelFs::Make(const char* what, const std::string& path, bool folder) {
  ASSIGN_OR_RETURN(const Fate fate, Count(absl::StrCat(what, " ", path)));
  const auto parent = FindFolder(ModelFolderOf(path));
  if (!parent.ok()) return ModelError(what, path, parent.status());
  if ((*parent)->names.contains(ModelNameOf(path))) {
    return ModelError(what, path, absl::AlreadyExistsError("it is there already"));
  }
  auto node = std::make_shared<ModelNode>(ModelNode{.is_folder = folder});
  if (fate == Fate::kDo) (*parent)->Add({.node = node, .name = ModelNameOf(path)});
  return node;
}

absl::StatusOr<std::unique_ptr<OutputFile>> ModelFs::Create(const std::string& path) {
  absl::MutexLock lock(&mu_);
  ASSIGN_OR_RETURN(NodePtr node, Make("create", path, false));
  return std::make_unique<ModelOutputFile>(this, std::move(node), path);
}

absl::Status ModelFs::MakeFolder(const std::string& path) {
  absl::MutexLock lock(&mu_);
  return Make("mkdir", path, true).status();
}

absl::StatusOr<std::unique_ptr<InputFile>> ModelFs::Open(const std::string& path) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CountRead(absl::StrCat("open ", path)));
  const auto node = Find(path);
  if (!node.ok()) return ModelError("open", path, node.status());
  if ((*node)->is_folder) return absl::FailedPreconditionError(absl::StrCat(path, " is no ordinary file"));
  return std::make_unique<ModelInputFile>(this, *node, path, (*node)->content.size());
}

absl::StatusOr<std::vector<Fs::Entry>> ModelFs::List(const std::string& path) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CountRead(absl::StrCat("list ", path)));
  const auto node = FindFolder(path);
  if (!node.ok()) return ModelError("list", path, node.status());
  std::vector<Entry> entries;
  for (const auto& [name, child] : (*node)->names) {
    entries.push_back({name, child->is_folder ? Kind::kFolder : Kind::kFile});
  }
  return entries;
}

absl::Status ModelFs::Rename(const std::string& from, const std::string& to) {
  absl::MutexLock lock(&mu_);
  ASSIGN_OR_RETURN(const Fate fate, Count(absl::StrCat("rename ", from, " ", ModelNameOf(to))));
  if (ModelFolderOf(from) != ModelFolderOf(to)) {
    return ModelError("rename", from, absl::InvalidArgumentError(absl::StrCat(to, " is in another folder")));
  }
  const auto node = Find(from);
  if (!node.ok()) return ModelError("rename", from, node.status());
  if (Find(to).ok()) return ModelError("rename", from, absl::AlreadyExistsError(absl::StrCat(to, " is there already")));
  ASSIGN_OR_RETURN(const NodePtr parent, FindFolder(ModelFolderOf(from)));
  if (fate == Fate::kDo) parent->Add({.node = *node, .name = ModelNameOf(to)});
  return absl::OkStatus();
}

absl::Status ModelFs::Remove(const char* what, const std::string& path, bool folder) {
  ASSIGN_OR_RETURN(const Fate fate, Count(absl::StrCat(what, " ", path)));
  const auto node = Find(path);
  if (!node.ok()) return ModelError(what, path, node.status());
  if ((*node)->is_folder != folder) {
    return ModelError(what, path, absl::FailedPreconditionError(folder ? "it is no folder" : "it is a folder"));
  }
  if (!(*node)->names.empty()) return ModelError(what, path, absl::AlreadyExistsError("it is not empty"));
  ASSIGN_OR_RETURN(const NodePtr parent, FindFolder(ModelFolderOf(path)));
  if (fate == Fate::kDo) parent->Add({.node = *node});
  return absl::OkStatus();
}

absl::Status ModelFs::RemoveFile(const std::string& path) {
  absl::MutexLock lock(&mu_);
  return Remove("remove", path, false);
}

absl::Status ModelFs::RemoveFolder(const std::string& path) {
  absl::MutexLock lock(&mu_);
  return Remove("rmdir", path, true);
}

absl::Status ModelFs::SyncFolder(const std::string& path) {
  absl::MutexLock lock(&mu_);
  const auto fate = Count(absl::StrCat("sync ", path));
  const auto node = FindFolder(path);
  if (!fate.ok()) {
    if (node.ok()) (*node)->SyncFails();
    return fate.status();
  }
  if (!node.ok()) return ModelError("sync", path, node.status());
  if (*fate == Fate::kDo) (*node)->Sync();
  return absl::OkStatus();
}

absl::StatusOr<Fs::Space> ModelFs::SpaceOf(const std::string& path) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CountRead(absl::StrCat("space ", path)));
  if (const auto node = Find(path); !node.ok()) return ModelError("ask the space of", path, node.status());
  const uint64_t size = capacity_.value_or(uint64_t{1} << 40);
  return Space{.free_bytes = std::min(size, Room()), .size_bytes = size};
}

absl::StatusOr<std::unique_ptr<FolderLock>> ModelFs::Lock(const std::string& path) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(Count(absl::StrCat("lock ", path)).status());
  const auto parent = FindFolder(ModelFolderOf(path));
  if (!parent.ok()) return ModelError("lock", path, parent.status());
  const auto found = (*parent)->names.find(ModelNameOf(path));
  if (found == (*parent)->names.end()) {
    (*parent)->Add({.node = std::make_shared<ModelNode>(), .name = ModelNameOf(path)});
  } else if (found->second->is_folder) {
    return ModelError("lock", path, absl::FailedPreconditionError("it is a folder"));
  }
  absl::MutexLock locks(&locks_->mu);
  const std::string folder = ModelFolderOf(path);
  if (!locks_->held.insert(folder).second)
    return absl::UnavailableError(absl::StrCat(path, " is held by another daemon"));
  return std::make_unique<ModelLock>([locks = locks_, folder] {
    absl::MutexLock release(&locks->mu);
    locks->held.erase(folder);
  });
}

std::unique_ptr<ModelFs> ModelFs::AfterCut(Choose choose) const {
  auto after = std::make_unique<ModelFs>();
  absl::MutexLock lock(&mu_);
  absl::MutexLock lock_after(&after->mu_);
  after->root_ = root_->AfterCut(choose);
  after->capacity_ = capacity_;
  after->sync_keeps_name_ = sync_keeps_name_;
  return after;
}

std::unique_ptr<ModelFs> ModelFs::AfterCut(uint64_t seed) const {
  uint64_t draw = seed;
  // Most of it is lost, or half, or little: what goes wrong is often that a single one is lost, or is there.
  const uint64_t kept_of_8 = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 7 : 4;
  return AfterCut([&](uint64_t options) -> uint64_t {
    if (seed <= 1) return seed * (options - 1);
    const uint64_t drawn = testing::SplitMix(&draw);
    if (options > 2 && drawn % 4 == 0) return testing::SplitMix(&draw) % options;
    return drawn / 4 % 8 < kept_of_8 ? options - 1 : 0;
  });
}

bool ModelFs::Exists(const std::string& path) const {
  absl::MutexLock lock(&mu_);
  return Find(path).ok();
}

std::string ModelFs::Content(const std::string& path) const {
  absl::MutexLock lock(&mu_);
  return FileAt(path)->content;
}

void ModelFs::SetContent(const std::string& path, std::string content) {
  absl::MutexLock lock(&mu_);
  const NodePtr node = FileAt(path);
  node->content = std::move(content);
  node->Keep();
}

void ModelFs::Flip(const std::string& path, uint64_t byte, int bit) {
  std::string content = Content(path);
  char& damaged = content.at(byte);  // std::out_of_range is an error of the test's
  damaged = static_cast<char>(damaged ^ (1 << bit));
  SetContent(path, std::move(content));
}

void ModelFs::Truncate(const std::string& path, uint64_t bytes) { SetContent(path, Content(path).substr(0, bytes)); }

std::string ModelFs::Dump() const {
  std::string dump;
  absl::MutexLock lock(&mu_);
  root_->Dump("", &dump);
  return dump;
}

}  // namespace ballast
