#include "tests/server/storage/model_fs.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ballast {
namespace {

std::string NameIn(const std::string& path) { return path.substr(path.rfind('/') + 1); }

std::string FolderOfPath(const std::string& path) { return path.substr(0, path.rfind('/')); }

// A generator of its own, so that a seed means the same everywhere.
uint64_t NextDraw(uint64_t* state) {
  *state += 0x9e3779b97f4a7c15ull;
  uint64_t z = *state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  return (z ^ (z >> 27)) >> 20;
}

class ModelInputFile final : public InputFile {
 public:
  explicit ModelInputFile(std::string content) : content_(std::move(content)) {}
  uint64_t bytes() const override { return content_.size(); }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) override {
    if (offset + to.size() > content_.size()) return absl::DataLossError("the file ends before");
    if (!to.empty()) std::memcpy(to.data(), content_.data() + offset, to.size());
    return absl::OkStatus();
  }

 private:
  const std::string content_;
};

class ModelLock final : public FolderLock {
 public:
  explicit ModelLock(int* count) : count_(count) {}
  ~ModelLock() override { --*count_; }

 private:
  int* const count_;
};

}  // namespace

class ModelOutputFile final : public OutputFile {
 public:
  ModelOutputFile(ModelFs* fs, ModelFs::NodePtr node, std::string path)
      : fs_(fs), node_(std::move(node)), path_(std::move(path)) {}
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> bytes) override {
    return fs_->Store(node_, path_,
                      {.offset = offset, .bytes = {reinterpret_cast<const char*>(bytes.data()), bytes.size()}});
  }
  absl::Status SetSize(uint64_t bytes) override { return fs_->Store(node_, path_, {.size = bytes}); }
  absl::Status Sync() override { return fs_->SyncNode(node_, absl::StrCat("sync ", path_)); }

 private:
  ModelFs* const fs_;
  const ModelFs::NodePtr node_;
  const std::string path_;
};

ModelFs::ModelFs() : root_(std::make_shared<Node>()) { root_->is_folder = true; }
ModelFs::~ModelFs() = default;

absl::StatusOr<ModelFs::Fate> ModelFs::Count(std::string what) {
  ++calls_;
  log_.push_back(what);
  if (cut_at_ && calls_ >= *cut_at_) return absl::UnavailableError("power cut");
  if (const auto failure = fail_at_.find(calls_); failure != fail_at_.end()) {
    return absl::Status(failure->second.code(), absl::StrCat(what, ": ", failure->second.message()));
  }
  return skip_at_ == calls_ ? Fate::kSkip : Fate::kDo;
}

int ModelFs::calls() const {
  absl::MutexLock lock(&mu_);
  return calls_;
}
void ModelFs::CutAt(int call) {
  absl::MutexLock lock(&mu_);
  cut_at_ = call;
}
void ModelFs::FailAt(int call, absl::Status status) {
  absl::MutexLock lock(&mu_);
  fail_at_[call] = std::move(status);
}
void ModelFs::SkipAt(int call) {
  absl::MutexLock lock(&mu_);
  skip_at_ = call;
}
void ModelFs::set_capacity(uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  capacity_ = bytes;
}
std::vector<std::string> ModelFs::log() const {
  absl::MutexLock lock(&mu_);
  return log_;
}

ModelFs::NodePtr ModelFs::Find(const std::string& path) const {
  NodePtr node = root_;
  for (const absl::string_view name : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    if (node == nullptr || !node->is_folder) return nullptr;
    const auto found = node->names.find(std::string(name));
    node = found == node->names.end() ? nullptr : found->second;
  }
  return node;
}

ModelFs::NodePtr ModelFs::Parent(const std::string& path) const {
  NodePtr parent = Find(FolderOfPath(path));
  return parent != nullptr && parent->is_folder ? parent : nullptr;
}

void ModelFs::Apply(const Change& change, Node* node) {
  if (node->is_folder) {
    if (!change.gone.empty()) node->names.erase(change.gone);
    if (!change.come.empty()) node->names[change.come] = change.node;
  } else if (change.size) {
    node->content.resize(*change.size, '\0');
  } else {
    if (node->content.size() < change.offset + change.bytes.size()) {
      node->content.resize(change.offset + change.bytes.size(), '\0');
    }
    node->content.replace(change.offset, change.bytes.size(), change.bytes);
  }
}

absl::Status ModelFs::Store(const NodePtr& node, const std::string& path, Change change) {
  absl::MutexLock lock(&mu_);
  const auto fate = Count(absl::StrCat(change.size ? "size " : "write ", path));
  if (!fate.ok()) return fate.status();
  if (*fate == Fate::kSkip) return absl::OkStatus();
  const uint64_t more = change.bytes.size();
  if (capacity_ && UsedBytes(*root_) + more > *capacity_) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot write ", path, ": the disk is full"));
  }
  Apply(change, node.get());
  node->unsynced.push_back(std::move(change));
  return absl::OkStatus();
}

absl::Status ModelFs::SyncNode(const NodePtr& node, const std::string& what) {
  absl::MutexLock lock(&mu_);
  const auto fate = Count(what);
  if (!fate.ok()) node->given_up = true;
  if (!fate.ok()) return fate.status();
  if (*fate == Fate::kSkip || node->given_up) return absl::OkStatus();
  node->synced_content = node->content;
  node->synced_names = node->names;
  node->unsynced.clear();
  return absl::OkStatus();
}

absl::Status ModelFs::Enter(const std::string& path, NodePtr node) {
  const NodePtr parent = Parent(path);
  if (parent == nullptr) return absl::NotFoundError(absl::StrCat("no folder for ", path));
  if (parent->names.contains(NameIn(path))) return absl::AlreadyExistsError(path);
  Change change{.come = NameIn(path), .node = std::move(node)};
  Apply(change, parent.get());
  parent->unsynced.push_back(std::move(change));
  return absl::OkStatus();
}

absl::Status ModelFs::Leave(const std::string& path, bool folder) {
  const NodePtr node = Find(path);
  if (node == nullptr) return absl::NotFoundError(path);
  if (node->is_folder != folder) return absl::FailedPreconditionError(path);
  if (folder && !node->names.empty()) return absl::AlreadyExistsError(absl::StrCat(path, " is not empty"));
  const NodePtr parent = Parent(path);
  Change change{.gone = NameIn(path)};
  Apply(change, parent.get());
  parent->unsynced.push_back(std::move(change));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OutputFile>> ModelFs::Create(const std::string& path) {
  absl::MutexLock lock(&mu_);
  if (const auto fate = Count(absl::StrCat("create ", path)); !fate.ok()) return fate.status();
  const auto node = std::make_shared<Node>();
  if (auto s = Enter(path, node); !s.ok()) return s;
  return std::make_unique<ModelOutputFile>(this, node, path);
}

absl::StatusOr<std::unique_ptr<InputFile>> ModelFs::Open(const std::string& path) {
  absl::MutexLock lock(&mu_);
  const NodePtr node = Find(path);
  if (node == nullptr) return absl::NotFoundError(absl::StrCat("cannot open ", path));
  if (node->is_folder) return absl::FailedPreconditionError(absl::StrCat(path, " is no ordinary file"));
  return std::make_unique<ModelInputFile>(node->content);
}

absl::Status ModelFs::MakeFolder(const std::string& path) {
  absl::MutexLock lock(&mu_);
  if (const auto fate = Count(absl::StrCat("mkdir ", path)); !fate.ok()) return fate.status();
  const auto node = std::make_shared<Node>();
  node->is_folder = true;
  return Enter(path, node);
}

absl::StatusOr<std::vector<Fs::Entry>> ModelFs::List(const std::string& path) {
  absl::MutexLock lock(&mu_);
  const NodePtr node = Find(path);
  if (node == nullptr) return absl::NotFoundError(absl::StrCat("cannot list ", path));
  if (!node->is_folder) return absl::FailedPreconditionError(path);
  std::vector<Entry> entries;
  for (const auto& [name, child] : node->names)
    entries.push_back({name, child->is_folder ? Kind::kFolder : Kind::kFile});
  return entries;
}

absl::Status ModelFs::Rename(const std::string& from, const std::string& to) {
  absl::MutexLock lock(&mu_);
  const auto fate = Count(absl::StrCat("rename ", from, " ", NameIn(to)));
  if (!fate.ok()) return fate.status();
  const NodePtr node = Find(from), parent = Parent(from);
  if (node == nullptr) return absl::NotFoundError(from);
  if (Find(to) != nullptr) return absl::AlreadyExistsError(to);
  if (*fate == Fate::kSkip) return absl::OkStatus();
  Change change{.gone = NameIn(from), .come = NameIn(to), .node = node};
  Apply(change, parent.get());
  parent->unsynced.push_back(std::move(change));
  return absl::OkStatus();
}

absl::Status ModelFs::RemoveFile(const std::string& path) {
  absl::MutexLock lock(&mu_);
  if (const auto fate = Count(absl::StrCat("remove ", path)); !fate.ok()) return fate.status();
  return Leave(path, false);
}

absl::Status ModelFs::RemoveFolder(const std::string& path) {
  absl::MutexLock lock(&mu_);
  if (const auto fate = Count(absl::StrCat("rmdir ", path)); !fate.ok()) return fate.status();
  return Leave(path, true);
}

absl::Status ModelFs::SyncFolder(const std::string& path) {
  NodePtr node;
  {
    absl::MutexLock lock(&mu_);
    node = Find(path);
  }
  if (node == nullptr) return absl::NotFoundError(path);
  return SyncNode(node, absl::StrCat("sync ", path));
}

absl::StatusOr<Fs::Space> ModelFs::SpaceOf(const std::string&) {
  absl::MutexLock lock(&mu_);
  const uint64_t size = capacity_.value_or(uint64_t{1} << 40), used = UsedBytes(*root_);
  return Space{.free_bytes = size - std::min(used, size), .size_bytes = size};
}

absl::StatusOr<std::unique_ptr<FolderLock>> ModelFs::Lock(const std::string& path) {
  absl::MutexLock lock(&mu_);
  int& held = locks_[path];
  if (held > 0) return absl::UnavailableError(absl::StrCat(path, " is held by another daemon"));
  ++held;
  return std::make_unique<ModelLock>(&held);
}

uint64_t ModelFs::UsedBytes(const Node& node) const {
  uint64_t sum = node.content.size();
  for (const auto& [_, child] : node.names) sum += UsedBytes(*child);
  return sum;
}

ModelFs::NodePtr ModelFs::Survivor(const Node& node, uint64_t seed, uint64_t* draw) {
  auto left = std::make_shared<Node>();
  left->is_folder = node.is_folder;
  left->content = node.synced_content;
  left->names = node.synced_names;
  for (Change change : node.unsynced) {
    const uint64_t drawn = NextDraw(draw);
    const bool stays = seed == 1 || (seed > 1 && drawn % 2 == 0);
    // A write may be torn between two sectors.
    if (seed > 1 && drawn % 5 == 0) change.bytes.resize(change.bytes.size() / 2 / 512 * 512);
    if (stays) Apply(change, left.get());
  }
  for (auto& [_, child] : left->names) child = Survivor(*child, seed, draw);
  left->synced_content = left->content;
  left->synced_names = left->names;
  return left;
}

std::unique_ptr<ModelFs> ModelFs::AfterCut(uint64_t seed) const {
  auto after = std::make_unique<ModelFs>();
  uint64_t draw = seed;
  absl::MutexLock lock(&mu_);
  absl::MutexLock lock_after(&after->mu_);
  after->root_ = Survivor(*root_, seed, &draw);
  return after;
}

std::string ModelFs::Content(const std::string& path) const {
  absl::MutexLock lock(&mu_);
  return Find(path)->content;
}
void ModelFs::SetContent(const std::string& path, std::string content) {
  absl::MutexLock lock(&mu_);
  Find(path)->content = std::move(content);
}
bool ModelFs::Exists(const std::string& path) const {
  absl::MutexLock lock(&mu_);
  return Find(path) != nullptr;
}

}  // namespace ballast
