#include "tests/client/fake_cuda_streams.h"

#include <chrono>
#include <cstring>

namespace ballast {

void* FakeCudaStreams::Make(int gpu) {
  void* const stream = reinterpret_cast<void*>(++last_stream_);
  streams_[stream] = std::make_shared<Stream>(Stream{.gpu = gpu});
  return stream;
}

// nullptr: not one of that GPU's.
std::shared_ptr<FakeCudaStreams::Stream> FakeCudaStreams::Find(void* stream, int gpu) const {
  const auto found = streams_.find(stream);
  return found == streams_.end() || found->second->gpu != gpu ? nullptr : found->second;
}

int FakeCudaStreams::Give(void* stream, int gpu, const Copy& copy) {
  const auto found = Find(stream, gpu);
  if (found == nullptr) return cuda::kInvalidHandle;
  found->items.push_back({.copy = copy});
  return cuda::kSuccess;
}

// Not done, unless nothing was left: who asks once alone gets one copy at most.
int FakeCudaStreams::Query(void* stream, int gpu, Lock& lock) {
  const auto found = Find(stream, gpu);
  if (found == nullptr) return cuda::kInvalidHandle;
  if (found->items.empty()) return cuda::kSuccess;
  const Item& next = found->items.front();
  if (!found->copying && next.work == 0 && !IsHeld(next.copy)) MakeCopy(*found, lock);
  return cuda::kNotReady;
}

int FakeCudaStreams::Synchronize(void* stream, int gpu, Lock& lock) {
  const auto found = Find(stream, gpu);
  if (found == nullptr) return cuda::kInvalidHandle;
  Drain(found, true, lock);
  return cuda::kSuccess;
}

int FakeCudaStreams::Destroy(void* stream, int gpu, Lock& lock) {
  if (const int result = Synchronize(stream, gpu, lock); result != cuda::kSuccess) return result;
  streams_.erase(stream);
  return cuda::kSuccess;
}

void FakeCudaStreams::DrainAll(int gpu, Lock& lock) {
  const auto streams = streams_;  // others may change it meanwhile
  for (const auto& [handle, stream] : streams) Drain(stream, stream->gpu == gpu, lock);
}

void FakeCudaStreams::MakeCopy(Stream& stream, Lock& lock) {
  const Copy copy = stream.items.front().copy;
  stream.copying = true;
  if (IsHeld(copy)) {
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !IsHeld(copy); });
    --waiting_;
  }
  lock.unlock();
  std::memmove(copy.write, copy.read, copy.bytes);
  lock.lock();
  stream.copying = false;
  if (!stream.items.empty()) stream.items.pop_front();
  changed_.notify_all();
}

// `of_others`: waits for their work too.
void FakeCudaStreams::Drain(const std::shared_ptr<Stream>& stream, bool of_others, Lock& lock) {
  const auto& items = stream->items;
  for (;;) {
    changed_.wait(lock, [&] { return !stream->copying && (items.empty() || items.front().work == 0 || !of_others); });
    if (items.empty() || items.front().work != 0) return;
    MakeCopy(*stream, lock);
  }
}

void FakeCudaStreams::Clear(int gpu) {
  for (const auto& [handle, stream] : streams_) {
    if (stream->gpu == gpu) stream->items.clear();
  }
  std::erase_if(works_, [&](const auto& work) { return work.second->gpu == gpu; });
  std::erase_if(streams_, [&](const auto& stream) { return stream.second->gpu == gpu; });
  changed_.notify_all();
}

void FakeCudaStreams::Clear() {
  for (int gpu = 0; gpu < cuda::kGpus; ++gpu) Clear(gpu);
  Hold(0);
}

int64_t FakeCudaStreams::BeginWork(void* stream, int gpu) {
  const auto found = Find(stream, gpu);
  if (found == nullptr) return 0;
  found->items.push_back({.work = ++last_work_});
  works_[last_work_] = found;
  return last_work_;
}

bool FakeCudaStreams::AwaitTurn(int64_t work, Lock& lock) {
  const auto is_next = [&] { return works_.at(work)->items.front().work == work; };
  changed_.wait(lock, [&] { return !works_.contains(work) || is_next(); });
  return works_.contains(work);
}

void FakeCudaStreams::EndWork(int64_t work) {
  const auto found = works_.find(work);
  if (found == works_.end()) return;
  std::erase_if(found->second->items, [&](const Item& item) { return item.work == work; });
  works_.erase(found);
  changed_.notify_all();
}

void FakeCudaStreams::Hold(cuda::Address at) {
  held_ = at;
  changed_.notify_all();
}

bool FakeCudaStreams::AwaitHeld(Lock& lock) {
  return changed_.wait_for(lock, std::chrono::minutes(1), [&] { return waiting_ > 0; });
}

int64_t FakeCudaStreams::copies() const {
  int64_t copies = 0;
  for (const auto& [handle, stream] : streams_) {
    for (const Item& item : stream->items) copies += item.work == 0 ? 1 : 0;
  }
  return copies;
}

}  // namespace ballast
