#include "server/base/file_watcher.h"

#include <utility>

namespace ballast {

FileWatcher::FileWatcher(std::vector<std::string> files, absl::Duration look_every)
    : files_(std::move(files)), look_every_(look_every), judged_(Look()), looked_(judged_) {}

FileWatcher::~FileWatcher() {
  stop_.Raise();
  if (thread_.joinable()) thread_.join();
}

void FileWatcher::Start(std::function<void()> on_changed, std::function<void()> on_look) {
  on_changed_ = std::move(on_changed);
  on_look_ = std::move(on_look);
  thread_ = std::thread([this] { Run(); });
}

FileWatcher::Stamps FileWatcher::Look() const {
  Stamps stamps;
  for (const std::string& file : files_) stamps.push_back(StampOf(file));
  return stamps;
}

void FileWatcher::Run() {
  while (!stop_.RaisedWithin(absl::ToDoubleSeconds(look_every_))) {
    LookAgain();
    if (on_look_ != nullptr) on_look_();
  }
}

void FileWatcher::LookAgain() {
  Stamps now = Look();
  if (now == judged_ || std::exchange(looked_, now) != now) return;
  // Before they are read: what changes meanwhile is other than this.
  judged_ = std::move(now);
  on_changed_();
}

}  // namespace ballast
