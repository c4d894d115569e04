import java.nio.charset.StandardCharsets;
import org.apache.kafka.clients.producer.internals.BuiltInPartitioner;

/** Prints, for each key, the partition that the Java producer gives it. */
class PartitionOf {
    public static void main(String[] arguments) {
        int partitions = Integer.parseInt(arguments[0]);
        for (int i = 1; i < arguments.length; i++) {
            byte[] key = arguments[i].getBytes(StandardCharsets.UTF_8);
            System.out.println(BuiltInPartitioner.partitionForKey(key, partitions));
        }
    }
}
