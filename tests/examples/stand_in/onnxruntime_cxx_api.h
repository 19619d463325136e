// What examples/cpp/segpipe_ort.cpp uses of ONNX Runtime's header. The session answers golden frames with the masks and
// confidences of the folder in SEGPIPE_GOLDEN, so that the program's own checks can be tested without that library.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>

enum { OrtArenaAllocator, OrtMemTypeDefault, ORT_LOGGING_LEVEL_FATAL };

namespace Ort {

struct Env { Env(int, const char*) {} };
struct AllocatorWithDefaultOptions {};
struct MemoryInfo { static MemoryInfo CreateCpu(int, int) { return {}; } };
struct RunOptions { explicit RunOptions(std::nullptr_t) {} };

struct SessionOptions {
  SessionOptions& SetIntraOpNumThreads(int) { return *this; }
  SessionOptions& SetInterOpNumThreads(int) { return *this; }
  SessionOptions& AddConfigEntry(const char*, const char*) { return *this; }
};

struct Value {
  char* data;
  size_t size;
  template <class T>
  static Value CreateTensor(const MemoryInfo&, T* start, size_t size, const int64_t*, size_t) {
    return {reinterpret_cast<char*>(start), size};
  }
};

struct ModelMetadata {
  std::string manifest;
  std::unique_ptr<char[]> LookupCustomMetadataMapAllocated(const char*, AllocatorWithDefaultOptions&) const {
    auto copy = std::make_unique<char[]>(manifest.size() + 1);
    std::memcpy(copy.get(), manifest.c_str(), manifest.size() + 1);
    return copy;
  }
};

class Session {
  std::string manifest_;

  static std::string golden(const char* name) {
    std::ifstream file(std::string(std::getenv("SEGPIPE_GOLDEN")) + "/" + name + ".npy", std::ios::binary);
    const std::string all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    return all.substr(10 + static_cast<uint8_t>(all.at(8)) + 256 * static_cast<uint8_t>(all.at(9)));
  }

 public:
  Session(Env&, const void* bytes, size_t size, const SessionOptions&) {
    const std::string model(static_cast<const char*>(bytes), size);
    const size_t start = model.find("{\n \""), end = model.find("\n}", start);  // manifest_text indents by one
    if (start == std::string::npos || end == std::string::npos) throw std::runtime_error("no model");
    manifest_ = model.substr(start, end + 2 - start);
  }

  ModelMetadata GetModelMetadata() const { return {manifest_}; }

  void Run(const RunOptions&, const char* const*, const Value* image, size_t, const char* const*, Value* answers, size_t) {
    const std::string images = golden("image");
    const size_t index = images.find(std::string(image->data, image->size)) / image->size;
    const char* const names[] = {"mask", "confidence"};
    for (size_t output = 0; output < 2; ++output)
      std::memcpy(answers[output].data, golden(names[output]).data() + index * answers[output].size, answers[output].size);
  }
};

}  // namespace Ort
